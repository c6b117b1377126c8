"""The system calls that a program may make: a fixed list. All others fail with EPERM.

The filter is a BPF program (`struct sock_filter`, linux/filter.h) that the kernel runs before each call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator

from millrace.devices import syscalls
from millrace_sandbox.inside.limits import Limits

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1

LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

FIRST_X32 = 0x40000000
CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000
AF_UNIX, SOCK_STREAM = 1, 1
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, WINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
FCNTLS = (*range(8), 36, 37, 38, 1030, 1032)  # duplicates, flags, locks, size of a pipe: no owner
PRCTLS = (3, 15, 16, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k


def install(limits: Limits, *, threads: bool) -> None:
    """Filter this process's calls, and those of its children, for good.

    Args:
        threads: the program may start threads; with `limits.processes` above 1 processes too.
    Raises:
        OSError: the kernel refuses.
    """
    syscalls.prctl(PR_SET_NO_NEW_PRIVS, 1)
    instructions = list(program(os.getpid(), limits.processes > 1, threads))
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer)))
    syscalls.call("seccomp", SECCOMP_SET_MODE_FILTER, 0, header)


def program(pid: int, forks: bool, threads: bool) -> Iterator[Instruction]:
    """The filter for the process `pid`."""
    yield LOAD, 0, 0, ARCHITECTURE
    yield EQUAL, 1, 0, syscalls.AUDIT_ARCHITECTURES[syscalls.machine()]
    yield RETURN, 0, 0, KILL
    yield LOAD, 0, 0, NUMBER
    yield AT_LEAST, 0, 1, FIRST_X32
    yield RETURN, 0, 0, KILL
    for name in ("clone3", "openat2"):  # their arguments lie in memory: libc falls back to the older calls
        yield from when(syscalls.numbers(syscalls.OURS)[name], [(RETURN, 0, 0, FAIL | errno.ENOSYS)])
    for number in syscalls.numbers(syscalls.HARMLESS).values():
        yield from when(number, [(RETURN, 0, 0, ALLOW)])
    for name, number in syscalls.numbers(syscalls.EXAMINED).items():
        yield from when(number, list(examined(name, pid, forks, threads)))
    yield RETURN, 0, 0, FAIL | errno.EPERM


def when(number: int, then: list[Instruction]) -> Iterator[Instruction]:
    yield EQUAL, 0, len(then), number
    yield from then


def examined(name: str, pid: int, forks: bool, threads: bool) -> Iterator[Instruction]:
    """What decides of a call whose arguments count. The last instruction returns."""
    match name:
        case "clone":
            yield from _masked(0, CLONE_NAMESPACES, 0, refuse_equal=False)
            if not forks:
                yield from _masked(0, CLONE_THREAD, CLONE_THREAD, refuse_equal=False)
            yield RETURN, 0, 0, ALLOW if threads or forks else FAIL | errno.EAGAIN
        case "fork" | "vfork" | "execve" | "setpgid" | "setsid" | "tkill":
            yield RETURN, 0, 0, ALLOW if forks else FAIL | errno.EPERM
        case "kill" | "tgkill" if forks:  # a pid namespace is around all that it can name
            yield RETURN, 0, 0, ALLOW
        case "kill" | "tgkill":
            yield from _one_of(0, (pid,))
        case "prlimit64":
            yield from _one_of(0, (0, pid))
        case "prctl":
            yield from _one_of(0, PRCTLS)
        case "ioctl":
            yield from _one_of(1, IOCTLS)
        case "fcntl":
            yield from _one_of(1, FCNTLS)
        case "socketpair":  # a datagram socket of a pair could send to other addresses
            yield from _masked(1, 0xF, SOCK_STREAM, refuse_equal=False)
            yield from _one_of(0, (AF_UNIX,))
        case "open" | "openat":  # Landlock before ABI 3 does not see a truncation by a reader
            flags = os.O_ACCMODE | os.O_TRUNC
            yield from _masked(1 if name == "open" else 2, flags, os.O_TRUNC, refuse_equal=True)
            yield RETURN, 0, 0, ALLOW


def _argument(index: int) -> Instruction:
    """Load the low half of an argument. Every examined argument is an `int`, or has no flag above."""
    return LOAD, 0, 0, ARGUMENTS + 8 * index


def _masked(index: int, mask: int, value: int, *, refuse_equal: bool) -> Iterator[Instruction]:
    yield _argument(index)
    yield AND, 0, 0, mask
    yield EQUAL, *((0, 1) if refuse_equal else (1, 0)), value
    yield RETURN, 0, 0, FAIL | errno.EPERM


def _one_of(index: int, values: Iterable[int]) -> Iterator[Instruction]:
    yield _argument(index)
    for value in values:
        yield EQUAL, 0, 1, value & 0xFFFFFFFF
        yield RETURN, 0, 0, ALLOW
    yield RETURN, 0, 0, FAIL | errno.EPERM
