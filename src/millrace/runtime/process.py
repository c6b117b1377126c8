"""Facts about Linux processes that the standard library does not reach: signals, ends, children, the sockets
on which processes listen, the stacks of their threads and tasks, on demand, and what workers need of the
kernel and of this process. A run checks the last first: it would fail in the middle.

A worker that gets the signal `DUMP_STACKS` writes its stacks into its log, and so do all processes of a run
whose controller gets it. The run goes on. C code writes the stacks of threads, also while the worker is stuck
in a call. The loop, if it still turns, writes the stacks of tasks.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import platform
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, ModuleType
from typing import TextIO

from millrace.core.errors import WorkerError

DUMP_STACKS = signal.SIGUSR1
"""The forkserver ignores this signal. A worker ignores it until the worker can answer."""


def answer_dumps() -> None:
    """Write to stderr on every `DUMP_STACKS` from now on. Call it on the running loop."""
    asyncio.get_running_loop().add_signal_handler(DUMP_STACKS, _dump_tasks, sys.stderr)
    faulthandler.register(DUMP_STACKS, all_threads=True, chain=True)


def survive_dumps() -> None:
    """Write the stacks of threads to stderr on every `DUMP_STACKS` from now on, which ends no process."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be no file
        faulthandler.register(DUMP_STACKS, all_threads=True)


@contextmanager
def dumping(dump: Callable[[], None]) -> Iterator[None]:
    """In the block every `DUMP_STACKS` calls `dump` on the running loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(DUMP_STACKS, dump)
    try:
        yield
    finally:
        loop.remove_signal_handler(DUMP_STACKS)
        survive_dumps()


def dump_stacks(path: Path) -> None:
    """Append the stacks of this process to `path`. Call it on the running loop."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n==== {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        _dump_tasks(file)


def _dump_tasks(file: TextIO) -> None:
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        file.write(f"\n-- task {task.get_name()}\n")
        task.print_stack(file=file)
    file.flush()


# ---------------------------------------------------------------- sockets


_NET = Path("/proc/net")
_TCP_LISTEN = "0A"
_UNIX_ACCEPTS = 0x10000  # __SO_ACCEPTCON


def listening(pids: Iterable[int]) -> set[str]:
    """The listening sockets of these processes, in words: "tcp port 8080", "unix /run/x". A process that we
    may not look at has none."""
    names = dict(_listening())
    return {names[link] for pid in pids for link in _open_files(pid) if link in names}


def _listening() -> Iterator[tuple[str, str]]:
    """(its link in /proc/PID/fd, its description) of every listening socket of this network namespace."""
    for table in ("tcp", "tcp6"):
        for fields in _lines(table):
            if fields[3] == _TCP_LISTEN:
                yield f"socket:[{fields[9]}]", f"tcp port {int(fields[1].rpartition(':')[2], 16)}"
    for fields in _lines("unix"):
        if int(fields[3], 16) & _UNIX_ACCEPTS:
            yield f"socket:[{fields[6]}]", f"unix {fields[7] if len(fields) > 7 else 'without a name'}"


def _lines(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in (_NET / table).read_text().splitlines()[1:]]
    except OSError:  # no IPv6, say
        return []


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


# ---------------------------------------------------------------- signals, ends and children


PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_OTHER = {
    *(signal.SIGKILL, signal.SIGSTOP),  # nobody can handle these
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG),
    signal.SIGWINCH,  # as those before: no process ends by it
    *(signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGSEGV, signal.SIGSYS),  # as those before: the process itself is broken
    *(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these: a write fails
    DUMP_STACKS,
}
ENDING = tuple(sorted(signal.valid_signals() - _OTHER))
"""Of a terminal (SIGINT, SIGHUP, SIGQUIT), schedulers (SIGTERM, SIGUSR2, SIGXCPU), timers and others."""

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


# ---------------------------------------------------------------- what workers need


NEEDED: tuple[tuple[ModuleType, str], ...] = (
    (os, "pidfd_open"),  # the controller sees a worker's end at once, and a signal never hits another process
    (signal, "pidfd_send_signal"),
    (os, "memfd_create"),  # published weights are in memory without a file
    (os, "sched_getaffinity"),
)
PROC = Path("/proc/self/stat")

FILES_A_WORKER = 2
"""Open files of the controller for each worker: its socket and its pidfd."""
FILES_BESIDE = 256
"""For all else: the ledger, logs, forks under way, modules that are being imported."""
FILES = 65_536
"""The soft limit, if the hard limit allows it. A hard limit can be a billion, and some programs try to close
every number up to the soft limit."""


def check_kernel() -> None:
    """Raises: WorkerError: no worker can run on this host. The message names the commands that still work."""
    missing = [name for module, name in NEEDED if not hasattr(module, name)]
    if not PROC.exists():
        missing.append("/proc")
    if missing:
        raise WorkerError(
            f"worker processes need Linux 5.3 or newer. This is {platform.system()} {platform.release()}, "
            f"without {', '.join(missing)}.\n"
            "  Use a container or a virtual machine with Linux (docs/installing.md). These commands\n"
            "  work here: show, doctor, ui, report, compare, trace, export, simulate, plan, sft, fetch"
        )


def allow_open_files(num_workers: int) -> None:
    """Raise this process's soft limit on open files, so that it can watch `num_workers` local workers.

    Raises: WorkerError: its hard limit is too low, and only the user can raise that.
    """
    needed = FILES_A_WORKER * num_workers + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WorkerError(
            f"{num_workers} local workers need {needed} open files of the controller, and its hard limit is "
            f"{hard}.\n"
            "  Raise it (`LimitNOFILE=` of systemd, `--ulimit nofile=` of a container, `ulimit -n` as root), "
            "or lower `rollout.replicas`"
        )
    limit = max(FILES, needed) if hard == resource.RLIM_INFINITY else min(hard, max(FILES, needed))
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
