"""Facts about Linux processes that the standard library does not reach."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from millrace.core.ending_signals import ENDING

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

SPAWN = multiprocessing.get_context("spawn")
"""For pools: a fork of a process with threads may hang."""

ONE_HASH_SEED = {"PYTHONHASHSEED": "0"}
"""A variable of every worker, whatever the environment says. So rows whose order is that of a set are the
same in each worker, on each host, and when a run is resumed."""

CUT_OFF = 70
"""Exit status of a worker that stopped itself because its controller had fallen silent."""
CONTROLLER_LOST = 71
"""Exit status of a worker whose controller has closed their socket."""

NOTICED = 73
"""Exit status of a worker that stopped itself a while after the notice that its host goes away."""

UNSUITABLE_PYTHON = 72
"""Exit status of a worker whose own Python cannot be started, or cannot import what the wire needs."""

_EXIT_MEANINGS = {
    CUT_OFF: "stopped itself: its controller fell silent",
    CONTROLLER_LOST: "stopped itself: the controller is gone",
    NOTICED: "stopped itself: it got a notice to end, and was not emptied in time",
    UNSUITABLE_PYTHON: "its Python cannot run it: the worker's log says why",
}

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the parent's thread that made this process ends; exit if it has already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(CONTROLLER_LOST)


def outlive_parent() -> None:
    """In place of `die_with_parent`: when the parent ends, the kernel wakes this process if it is
    suspended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def leave_signals() -> None:
    """Ignore the signals that ask a process to end: the controller ends this process by SIGKILL."""
    for number in ENDING:
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None: ...


def heeded() -> list[int]:
    """The signals of `ENDING` that this process is to obey. `nohup` and shells have it ignore others, and a
    library may have its own use for one."""
    mine = (signal.SIG_DFL, signal.default_int_handler, _interrupt)
    always = (signal.SIGINT, signal.SIGTERM)
    return [number for number in ENDING if number in always or signal.getsignal(number) in mine]


def interrupt_on_signals() -> None:
    """Every signal that asks this process to end is an interrupt from now on. A second one ends nothing
    sooner, unless a person sends it (SIGINT): programs send theirs to a process and to its group, and again.
    """
    for number in heeded():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _interrupt)


_interrupted: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _interrupted:
        _interrupted.append(number)
        raise KeyboardInterrupt


def fork_ordinary_processes() -> None:
    """From now on `terminate()` ends the processes that this process forks, as it ends any process."""
    os.register_at_fork(after_in_child=_default_signals)


def _default_signals() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _leave or number == signal.SIGTERM:  # asyncio has its own for SIGTERM
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """This process ends with the block, however the block ends, and without Python's shutdown. A shutdown
    would first close the sockets, and the controller would see a worker that can no longer be commanded."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


@contextmanager
def killing_on_error() -> Iterator[None]:
    """An exception in the block kills the processes of `multiprocessing` that began in the block. Their pool
    would wait for what they compute."""
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """An interrupt in the block is raised at its end: code with locks is not left in its middle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raising, received = (signal.default_int_handler, _interrupt), list[int]()
    handlers = {number: one for number in ENDING if (one := signal.getsignal(number)) in raising}
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            raise KeyboardInterrupt


def set_title(title: str) -> None:
    """The name that `ps` and `top` show (15 bytes)."""
    _prctl(PR_SET_NAME, title.encode()[:15])


def describe_exit(code: int) -> str:
    """An exit code (-N: signal N) in words: "exited with code 1", "killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return _EXIT_MEANINGS.get(code, f"exited with code {code}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by signal {-code} ({name})"


def zombie_exit(pid: int) -> str | None:
    """How `pid` ended, if it has ended and its parent has not reaped it yet."""
    fields = stat_fields(pid)
    return describe_exit(os.waitstatus_to_exitcode(int(fields[49]))) if fields[:1] == ["Z"] else None


def stopped(pid: int) -> bool:
    """Whether `pid` is suspended, by SIGSTOP or a debugger."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


def next_dead_child() -> tuple[int, str] | None:
    """A child that has ended, and how it ended. The child stays unreaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_pid, describe_exit(
        ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    )


def kill(pid: int) -> None:
    """SIGKILL to `pid` and to the process group that it leads, if any. The process may have ended already."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def children(parent_pid: int) -> list[int]:
    """Direct children of `parent_pid`, zombies included."""
    return [pid for pid, parent in parents().items() if parent == parent_pid]


def descendants(pid: int) -> list[int]:
    """Children of `pid`, theirs, and so on, zombies included."""
    by_parent: dict[int, list[int]] = {}
    for child, parent in parents().items():
        by_parent.setdefault(parent, []).append(child)
    pids = [pid]
    for parent in pids:
        pids += by_parent.get(parent, [])
    return pids[1:]


def has_children() -> bool:
    """Whether this process has children, zombies included. One system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def parents() -> dict[int, int]:
    """The parent of every process, by process id. Reads a small file for each."""
    parents_by_pid = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(entry)):
            parents_by_pid[int(entry)] = int(fields[1])
    return parents_by_pid


def threads(pid: int) -> list[str]:
    """Thread ids. Empty: the process has ended."""
    with suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def queued_s(pid: int) -> float:
    """Seconds that the threads of `pid` have waited in the run queue, added up. Threads that have ended do
    not count, and neither does a wait that goes on. 0: the process has ended, or the kernel does not tell.

    /proc/PID/schedstat tells of the first thread only.
    """
    waited_ns = 0
    for thread in threads(pid):
        with suppress(OSError):
            waited_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    return waited_ns / 1e9


def stat_fields(pid: int | str) -> list[str]:
    """What /proc/PID/stat says behind the name: the state first. Empty: the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
