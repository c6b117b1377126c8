"""How the processes of one trainer find the coordinator of `jax.distributed`. Needs no JAX.

JAX ends a process that waits for another one in vain, and raises no error. So the processes meet here first.
The first process listens, and answers with the coordinator's address when all others have come.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from millrace.core.errors import WorkerError

MEET_S_MAX = 120.0
HELLO_S_MAX = 3.0
LOOK_S = 0.02
LOOPBACK = "127.0.0.1"


def meet(rank: int, count: int, rendezvous: str, stack: ExitStack) -> str:
    """The coordinator's address, when all `count` processes are there. Until `stack` closes, its port is kept
    for the coordinator of this process. `rendezvous`: see `processes.join`.

    Raises: WorkerError: another process does not come in time.
    """
    deadline_s = time.monotonic() + MEET_S_MAX
    if rank == 0:
        return _host(count, rendezvous, stack, deadline_s)
    address, problem = "", "nobody told where"
    while time.monotonic() < deadline_s:
        try:
            address = address or _address(rendezvous)
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=HELLO_S_MAX) as connection:
                connection.sendall(f"{rank}\n".encode())
                connection.settimeout(max(LOOK_S, deadline_s - time.monotonic()))
                if (answer := connection.makefile().readline()).endswith("\n"):
                    return answer.strip()
                problem = "it ended the connection"
        except (OSError, ValueError) as error:
            problem = str(error)
        time.sleep(LOOK_S)
    where = f" at {address}" if address else ""
    raise WorkerError(f"the first process did not answer{where} within {MEET_S_MAX:g} s: {problem}")


def _host(count: int, rendezvous: str, stack: ExitStack, deadline_s: float) -> str:
    """Let the other processes come to the first."""
    listener = stack.enter_context(_listener(rendezvous))
    host = listener.getsockname()[0]
    present = dict[int, socket.socket]()
    while len(present) < count - 1:
        listener.settimeout(max(LOOK_S, deadline_s - time.monotonic()))
        try:
            connection = stack.enter_context(listener.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(1, count)) - set(present))
            raise WorkerError(
                f"the processes {missing} did not come to {host} within {MEET_S_MAX:g} s"
            ) from None
        connection.settimeout(HELLO_S_MAX)
        with suppress(OSError, ValueError):  # a stranger
            rank = int(connection.makefile().readline())
            if 0 < rank < count:
                present[rank] = connection
    reserved = stack.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, 0))
    coordinator = f"{host}:{reserved.getsockname()[1]}"
    for connection in present.values():
        connection.sendall(f"{coordinator}\n".encode())
    return coordinator


def _listener(rendezvous: str) -> socket.socket:
    if not rendezvous.startswith("file://"):
        return socket.socket(fileno=int(os.environ["MILLRACE_LISTENS"]))
    listener = socket.create_server((os.environ.get("MILLRACE_NETWORK") or LOOPBACK, 0))
    host, port = listener.getsockname()
    Path(rendezvous.removeprefix("file://")).write_text(f"{host}:{port}\n")
    return listener


def _address(rendezvous: str) -> str:
    """Raises: ValueError: not yet."""
    if not rendezvous.startswith("file://"):
        return rendezvous.removeprefix("tcp://")
    text = Path(rendezvous.removeprefix("file://")).read_text()
    if not text.endswith("\n"):
        raise ValueError("the first process has not begun to listen")
    return text.strip()
