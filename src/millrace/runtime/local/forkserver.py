"""Forks workers out of a process that has already imported the heavy modules.

Importing torch takes more than a second; a fork of a process that has done it takes tens of milliseconds and
shares its memory. No worker runs the user's script again. A worker with a Python of its own is forked in the
same way. Then exec replaces its program by that Python. The rest of this text is true of both kinds of
worker.

No process outlives the controller, however the controller ends:
- The forkserver sees the controller's end through a pidfd and the closed control socket. Then the forkserver
  kills every descendant and exits. During its imports the forkserver cannot look, so the kernel kills it with
  the controller. The kernel wakes a suspended forkserver (and adds a SIGHUP, which must not end it).
- Every worker leads a process group, adopts its own orphans and dies with the forkserver. When a worker ends,
  the forkserver kills its group. Other descendants of the worker become children of the forkserver. The
  forkserver kills every child that it did not make.
- If controller and forkserver are killed together, the workers still end. Nobody ends the processes that the
  workers have started.

Only the controller acts on SIGINT and SIGTERM. Schedulers send them to every process of a job, and the
controller may need its workers for an orderly end. Workers and forkserver end by SIGKILL.

Run by `runtime.local.launcher` as `python -m millrace.runtime.local.forkserver FD`, with FD one end of a
SOCK_SEQPACKET pair. The forkserver reads one ForkserverSetup, then Forks. It answers with Ready or Broken,
then Forked and Exited.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from millrace.core.errors import WorkerError
from millrace.runtime import process
from millrace.runtime.local import worker_process

MAX_PACKET = 128 * 1024
SPAWNED = str(Path(__file__).with_name("spawned.py"))


class ForkserverSetup(msgspec.Struct, tag=True):
    """`python_path` is the PYTHONPATH of workers (None: unset)."""

    controller_pid: int
    sys_path: list[str]
    python_path: str | None
    preload: list[str]


class MakeWorker(msgspec.Struct, tag=True):
    """Make a worker. Comes with its socket, and a log file if `logs`.

    `variables` are added to the worker's environment. With `python` the worker runs that interpreter, under
    the command `prefix` if there is one. The prefix must exec the interpreter.
    """

    fork_id: int
    name: str
    epoch: int
    silence_s_max: float | None
    logs: bool
    variables: dict[str, str]
    python: str | None
    prefix: tuple[str, ...] = ()


class Forked(msgspec.Struct, tag=True):
    """Comes with a pidfd, opened while no other process can have the pid."""

    fork_id: int
    pid: int


class Exited(msgspec.Struct, tag=True):
    fork_id: int
    cause: str


class Ready(msgspec.Struct, tag=True):
    """Everything is imported."""


class Broken(msgspec.Struct, tag=True):
    """The forkserver cannot work, and exits."""

    reason: str


Notice = Forked | Exited | Ready | Broken


class Forkserver:
    """Waits for: commands on the control socket, the end of the controller, the ends of children."""

    def __init__(self, control: socket.socket, controller_pidfd: int) -> None:
        self._control, self._pid = control, os.getpid()
        self._fork_ids: dict[int, int] = {}  # by pid
        self._wakeups, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._inherited = [control, self._wakeups, wakeup]
        self._pidfd = controller_pidfd
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the controller is gone. Then no descendant lives."""
        with selectors.PollSelector() as selector:
            for source in (self._control, self._wakeups, self._pidfd):
                selector.register(source, selectors.EVENT_READ)
            try:
                while True:
                    ready = {key.fileobj for key, _ in selector.select()}
                    if self._wakeups in ready:
                        self._wakeups.recv(4096)
                        self._reap()
                    if self._pidfd in ready or (self._control in ready and not self._obey()):
                        break
            except ConnectionError:
                pass  # the controller ended during this message
        self._end_all()

    def _obey(self) -> bool:
        """Take one command. False if the controller has closed its end."""
        packet, fds = receive(self._control)
        if not packet:
            return False
        command = msgspec.msgpack.decode(packet, type=MakeWorker)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_worker(command, fds)
        self._fork_ids[pid] = command.fork_id
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        send(self._control, Forked(command.fork_id, pid), [pidfd])
        os.close(pidfd)
        return True

    def _be_worker(self, command: MakeWorker, fds: list[int]) -> NoReturn:
        with process.ending_at_once():
            self._detach()
            os.environ.update(command.variables)
            process.set_title(command.name)
            if command.logs:
                os.dup2(fds[1], 1)
                os.dup2(fds[1], 2)
                os.close(fds[1])
            if command.python is not None:
                _become(command.python, command, fds[0])
            worker_process.main(
                socket.socket(fileno=fds[0]), command.name, command.epoch, command.silence_s_max
            )
        raise AssertionError("the process has ended")

    def _detach(self) -> None:
        """Own process group, own orphans, none of the forkserver's descriptors."""
        os.setpgid(0, 0)
        process.die_with_parent(self._pid)
        process.adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process.fork_ordinary_processes()
        for inherited in self._inherited:
            inherited.close()
        os.close(self._pidfd)

    def _reap(self) -> None:
        """Report the workers that ended, and kill the processes that these workers started.

        A dead worker is reaped last: until then no other process can get its pid and group.
        """
        ended = False
        while dead := process.next_dead_child():
            pid, cause = dead
            process.kill(pid)
            if pid in self._fork_ids:
                send(self._control, Exited(self._fork_ids.pop(pid), cause))
            os.waitpid(pid, 0)
            ended = True
        if ended:
            for orphan in set(process.children(self._pid)) - self._fork_ids.keys():
                process.kill(orphan)

    def _end_all(self) -> None:
        """Kill children until none lives. The children of a killed child become ours."""
        while pids := process.children(self._pid):
            for pid in pids:
                process.kill(pid)
            os.waitpid(-1, 0)


def send(control: socket.socket, message: msgspec.Struct, fds: list[int] | None = None) -> None:
    """Send one message with its descriptors. Raises: WorkerError: the message is longer than a packet."""
    packet = msgspec.msgpack.encode(message)
    if len(packet) > MAX_PACKET:
        kind = type(message).__name__
        raise WorkerError(f"{kind} message of {len(packet)} bytes; at most {MAX_PACKET}: shorten sys.path")
    socket.send_fds(control, [packet], fds or [])


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message (empty: the other end is closed) and its descriptors, not inheritable."""
    packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 2)
    for fd in fds:
        os.set_inheritable(fd, False)
    return packet, fds


def _become(python: str, command: MakeWorker, fd: int) -> NoReturn:
    """Exec `spawned` in another interpreter, under the command's prefix. The process keeps the group, the
    parent-death signal and the orphans that `_detach` set up."""
    os.set_inheritable(fd, True)
    for number in process.ENDING:  # until the new program ignores the signal itself
        signal.signal(number, signal.SIG_IGN)
    worker = [python, SPAWNED, str(fd), command.name, str(command.epoch), str(command.silence_s_max or 0)]
    arguments = [*command.prefix, *worker]
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        sys.stderr.write(f"{arguments[0]} cannot be started for {command.name}: {error.strerror}\n")
        raise SystemExit(process.UNSUITABLE_PYTHON) from error


def _preload(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"importing {modules} initialised CUDA, which no forked worker could use")
    gc.collect()
    gc.freeze()  # keeps collections in workers from touching, and so copying, the shared pages


def main() -> None:
    os.dup2(2, 1)  # what a worker prints without a log must not stand between the answers of the command
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(control.recv(MAX_PACKET), type=ForkserverSetup)
    process.die_with_parent(setup.controller_pid)
    process.adopt_orphans()
    process.set_title("forkserver")
    process.leave_signals()
    signal.signal(process.DUMP_STACKS, signal.SIG_IGN)
    sys.path[:] = setup.sys_path
    os.environ.pop("PYTHONPATH", None)
    if setup.python_path is not None:
        os.environ["PYTHONPATH"] = setup.python_path
    try:
        _preload(setup.preload)
    except Exception as error:
        send(control, Broken(f"preloading {setup.preload}: {type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    server = Forkserver(control, os.pidfd_open(setup.controller_pid))
    process.outlive_parent()
    try:
        send(control, Ready())
    except BrokenPipeError:
        return  # the controller has ended meanwhile, and nobody wants workers
    server.serve()


if __name__ == "__main__":
    main()
