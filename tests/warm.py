"""Processes for the runs of tests, forked out of one process that has imported what they need.

A forkserver of its own imports torch and transformers before it forks a run's first worker, for seconds. Here
one process does so for all runs of a test session. What it forks becomes the child of who asked, as a
forkserver must be. It is `runtime.local.forkserver`, or a command as `python -m millrace`, from its first
line on. Such a forkserver also forks the workers in network namespaces, which elsewhere are a Python started
afresh. A command forks a process of this kind first of all, so that its forkserver, too, need not import
anything.  Run as `python warm.py FD`, with FD one end of a SOCK_SEQPACKET pair. A request is what the
process inherits, with its descriptors; the answer is its pid.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from millrace.run.compose import PRELOAD
from millrace.runtime import process
from millrace.runtime.local import forkserver, launcher

MODULES = (
    *PRELOAD,
    "reasoning_gym",
    "transformers.models.qwen3.modeling_qwen3",
    "millrace.cli.app",
    "millrace.api.work",
)
COMMANDS, SCRIPT = ("millrace", "millrace.api.work"), "script.py"
MAX_PACKET = 128 * 1024
CLONE_NEWNET = 0x40000000
exec_worker = forkserver._become
DEADLINE_S = 300.0
"""Of an import and of a fork. Imports take 15 s on two cores, and a minute beside other work."""
ROOM = {"MILLRACE_TEST_ROOM": "." * 8192}  # in /proc/PID/environ, for variables of what is forked


class Forked:
    """A child that is no `Popen`, but can be killed and awaited like one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Warm:
    """Who asks the process that has imported everything, which ends when `control` is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lock = control, threading.Lock()

    def start(self, theirs: socket.socket) -> Forked:
        """A forkserver at that end of its control socket, in place of `launcher._start`."""
        return Forked(self.fork([], {**launcher.DEFAULTS, **os.environ}, os.getcwd(), [theirs.fileno()]))

    def fork(
        self, command: list[str], environ: dict[str, str], directory: str, fds: Sequence[int], **more: bool
    ) -> int:
        """A child's pid. Without a command it is a forkserver."""
        os.umask(umask := os.umask(0))
        asked = {"command": command, "environ": environ, "directory": directory, "umask": umask, **more}
        with self._lock:
            process._prctl(process.PR_SET_CHILD_SUBREAPER, 1)  # so that it becomes our child
            try:
                socket.send_fds(self._control, [json.dumps(asked).encode()], list(fds))
                return self._pid()
            finally:
                process._prctl(process.PR_SET_CHILD_SUBREAPER, 0)

    def _pid(self) -> int:
        """Raises: RuntimeError: the child could not begin. TimeoutError: it did not in time."""
        answer = self._control.recv(MAX_PACKET).decode()
        if not answer.isdecimal():
            raise RuntimeError(f"the fork failed: {answer or 'the process that forks has ended'}")
        return int(answer)

    def close(self) -> None:
        self._control.close()


def imported() -> tuple[Warm, subprocess.Popen[bytes]]:
    """A new process that has imported everything."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ROOM, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
        )
    control.settimeout(DEADLINE_S)
    try:
        if not control.recv(MAX_PACKET):
            raise RuntimeError("it ended while it imported")
    except BaseException:
        control.close()
        server.kill()
        server.wait()
        raise
    return Warm(control), server


def end(warm: Warm, server: subprocess.Popen[bytes]) -> None:
    warm.close()
    try:
        server.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise


def popen(warm: Warm) -> type[subprocess.Popen]:
    """`Popen`, but for commands of Millrace and every `script.py` in this Python, which `warm` forks."""

    class Popen(subprocess.Popen):
        def _execute_child(self, *args: Any) -> None:
            honest = super()._execute_child
            asked = inspect.signature(honest).bind(*args).arguments
            if not is_command(asked["args"]):
                honest(*args)
                return
            ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            try:
                self.pid = warm.fork(
                    list(map(os.fspath, asked["args"][1:])),
                    dict(os.environ if asked["env"] is None else asked["env"]),
                    os.path.abspath(asked["cwd"] or os.getcwd()),
                    [number if end == -1 else end for number, end in enumerate(ends)],
                    session=bool(asked["start_new_session"]),
                )
                self._child_created = True
            finally:
                pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                self._close_pipe_fds(*(asked[name] for name in pipes))

    return Popen


@contextmanager
def forked(warm: Warm) -> Iterator[None]:
    """Forkservers of this process, commands of Millrace and every `script.py` need not import torch."""
    with (
        mock.patch.object(launcher, "_start", warm.start),
        mock.patch.object(subprocess, "Popen", popen(warm)),
    ):
        yield


def is_command(args: object) -> bool:
    if not isinstance(args, list) or len(args) < 2 or args[0] != sys.executable:
        return False
    return (args[1] == "-m" and args[2] in COMMANDS) or os.path.basename(args[1]) == SCRIPT


def serve(control: socket.socket, asker: int) -> dict[str, Any]:
    """Fork what is asked for until nobody asks any more. Returns, in a command's process, its request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, it is the asker's
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 3)
        if not packet:
            os._exit(0)  # without a shutdown of everything imported
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # its child goes to the asker, which adopts orphans at this moment
            asked = json.loads(packet)
            try:
                _inherit(asked, fds, control, asker)
            except Exception as error:
                with suppress(OSError):  # the asker has its answer already
                    control.send(f"{type(error).__name__}: {error}".encode())
                raise
            return dict(asked)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _inherit(asked: dict[str, Any], fds: list[int], control: socket.socket, asker: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["environ"])
    _show(asked["environ"])
    os.umask(asked["umask"])
    os.chdir(asked["directory"])
    until_s = time.monotonic() + DEADLINE_S
    while os.getppid() != asker:
        if time.monotonic() > until_s:
            raise TimeoutError(f"process {asker} has not adopted this one")
        time.sleep(0.001)
    if not asked["command"]:
        with process.ending_at_once():
            os.setpgid(0, 0)
            control.send(str(os.getpid()).encode())
            control.close()
            sys.argv = [forkserver.__name__, str(fds[0])]
            forkserver._become = _become  # type: ignore[assignment]
            forkserver.main()
    if asked["session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in set(fds) - {0, 1, 2}:
        os.close(fd)
    control.send(str(os.getpid()).encode())
    control.close()


def _become(python: str, asked: forkserver.MakeWorker, fd: int) -> None:
    """In place of `forkserver._become`: a worker of this Python in a network namespace enters that itself."""
    *tool, name = asked.prefix or ("",)
    if python != sys.executable or tool != ["ip", "netns", "exec"]:
        exec_worker(python, asked, fd)
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no entry into {name}")


def _show(environ: dict[str, str]) -> None:
    """Have /proc/PID/environ tell these variables, as after an exec, of this process and its forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, after = int(fields[47]), int(fields[48])  # env_start, env_end
    content = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    if len(content) > after - first:
        raise RuntimeError(f"{len(content)} bytes of environment in {after - first}: make ROOM larger")
    ctypes.memmove(first, content.ljust(after - first, b"\0"), after - first)


def be_command(words: list[str]) -> None:
    """As `python *words` in this process, but that torch is imported already."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as the interpreter's own
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    control, asker = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    for name in MODULES:
        importlib.import_module(name)
    control.send(b"ready")
    while True:  # in one more process each time: a command's own process of this kind
        asked = serve(control, asker)
        asker = os.getpid()
        ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            control.close()
            ours.settimeout(DEADLINE_S)
            warm = Warm(ours)
            launcher._start = warm.start  # type: ignore[assignment]
            subprocess.Popen = popen(warm)  # type: ignore[misc]
            be_command(asked["command"])
            return
        ours.close()


if __name__ == "__main__":
    main()
