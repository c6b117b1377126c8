"""The processes of one trainer: one on each of its hosts, with all devices of that host.

They meet at the coordinator of `jax.distributed`, which runs in the first process. Small values go through
its store, and not through the devices: so a thread may exchange them beside a step.

JAX ends a process that waits for another one in vain, and raises no error. So the processes meet here first.
The first process listens, and answers with the coordinator's address when all others have come.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the public module has no store

from millrace.core.errors import WorkerError, boundary
from millrace.trainer.ranks.mesh import COLLECTIVE_TIMEOUT_S, Ranks

T = TypeVar("T")

SILENCE_S_MAX = 600
"""A process without a heartbeat for so long ends the others. The runtime sees its death long before."""


@dataclass(frozen=True, slots=True)
class Processes(Ranks):
    """Ranks of which each has a host of its own. `name`: of the group, whose values nobody else reads."""

    name: str = "trainer"
    _turns: Iterator[int] = field(default_factory=count, init=False)
    _groups: Iterator[int] = field(default_factory=count, init=False)

    def gather(self, value: T) -> list[T]:
        """As `Ranks.gather`. Raises: WorkerError: another process does not come."""
        if self.world == 1:
            return [value]
        store, turn = distributed.global_state.client, next(self._turns)
        with boundary("trainer", f"process {self.rank} of {self.world}: wait for the others", WorkerError):
            store.key_value_set_bytes(self._key(turn, self.rank), pickle.dumps(value))
            values = [value if rank == self.rank else self._of(rank, turn) for rank in range(self.world)]
            if turn:  # every process has begun this turn, so it has read the one before
                store.key_value_delete(self._key(turn - 1, self.rank))
        return values

    def broadcast(self, value: T) -> T:
        """The first process's value. All processes wait for one another."""
        return self.gather(value)[0]

    def in_own_group(self) -> Processes:
        return replace(self, name=f"{self.name}.{next(self._groups)}")

    def _of(self, rank: int, turn: int) -> Any:
        wait_ms = int(COLLECTIVE_TIMEOUT_S * 1000)
        written = distributed.global_state.client.blocking_key_value_get_bytes(self._key(turn, rank), wait_ms)
        return pickle.loads(written)

    def _key(self, turn: int, rank: int) -> str:
        return f"millrace/{self.name}/{turn}/{rank}"


@cache
def join(hosts: int) -> Processes:
    """This process among those of `hosts` hosts, after they have met, once. It comes before JAX looks for
    devices.

    RANK in the environment is its number. MILLRACE_RENDEZVOUS is a file that tells where the first process
    listens, or that address (`tcp://`), where it listens already, with the descriptor MILLRACE_LISTENS.

    Raises: WorkerError: another process does not come in time.
    """
    if hosts == 1:
        return Processes()
    rank = int(os.environ["RANK"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is the controller's
    with ExitStack() as stack:
        stack.enter_context(boundary("trainer", f"process {rank} of {hosts}: meet the others", WorkerError))
        coordinator = meet(rank, hosts, os.environ["MILLRACE_RENDEZVOUS"], stack)
        jax.distributed.initialize(
            coordinator,
            num_processes=hosts,
            process_id=rank,
            coordinator_bind_address=coordinator,
            heartbeat_timeout_seconds=SILENCE_S_MAX,
            cluster_detection_method="deactivate",
        )
    return Processes(shard=hosts, rank=rank, hosts=hosts)


# ---------------------------------------------------------------- meeting


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
