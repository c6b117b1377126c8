"""System calls by name: their numbers on x86_64 and aarch64, and a way to make them."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

MEANT = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT),
    *(signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS),
}
"""Signals that a launcher of other processes cannot ignore, or must not: of its children and its faults."""

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What a seccomp filter sees as the architecture of a call."""

HARMLESS = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226,
    munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
    pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
    access 21 -, faccessat 269 48, faccessat2 439 439, pipe 22 -, pipe2 293 59, select 23 -,
    pselect6 270 72, poll 7 -, ppoll 271 73, sched_yield 24 124, mremap 25 216, madvise 28 233,
    mincore 27 232, msync 26 227, dup 32 23, dup2 33 -, dup3 292 24, nanosleep 35 101,
    clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103, alarm 37 -, getpid 39 172,
    gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
    getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155, getpgrp 111 -,
    getsid 124 156, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, uname 63 160,
    flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, getdents64 217 61, getcwd 79 17,
    chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -,
    mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35,
    symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, umask 95 166,
    gettimeofday 96 169, time 201 -, times 100 153, clock_gettime 228 113, clock_getres 229 114,
    getrlimit 97 163, getrusage 98 165, sysinfo 99 179, statfs 137 43, fstatfs 138 44, stat 4 -,
    lstat 6 -, newfstatat 262 79, statx 332 291, futex 202 98, set_tid_address 218 96,
    set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, sched_getaffinity 204 123,
    getcpu 309 168, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
    epoll_pwait 281 22, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86,
    timerfd_gettime 287 87, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108,
    timer_delete 226 111, timer_getoverrun 225 109, getrandom 318 278, close_range 436 436,
    sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockname 51 204, getsockopt 55 209,
    arch_prctl 158 -, copy_file_range 326 285, sendfile 40 71, fadvise64 221 223, fallocate 285 47,
    pause 34 -, restart_syscall 219 128
"""
"""Calls that reach nothing beyond the own process, the files that it may open, and its descriptors.

Each has a name, a number on x86_64 and a number on aarch64. `-`: the call does not exist there."""

EXAMINED = """
    prlimit64 302 261, clone 56 220, fork 57 -, vfork 58 -, execve 59 221, kill 62 129, tgkill 234 131,
    socketpair 53 199, prctl 157 167, ioctl 16 29, fcntl 72 25, open 2 -, openat 257 56,
    setpgid 109 154, setsid 112 157, tkill 200 130
"""
"""Calls that are allowed with some arguments, or only to programs that may have several processes."""

OURS = """
    clone3 435 435, openat2 437 437, unshare 272 97, mount 165 40, umount2 166 39, pivot_root 155 41,
    mount_setattr 442 442, landlock_create_ruleset 444 444, landlock_add_rule 445 445,
    landlock_restrict_self 446 446, seccomp 317 277, capset 126 91, setgroups 116 159
"""
"""Calls that set up a sandbox, and that no program may make."""

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """The machine's name. Raises OSError: this file has no numbers for it."""
    name = platform.machine()
    if name not in AUDIT_ARCHITECTURES or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(f"no system call numbers for the machine {name!r}, only for x86_64 and aarch64")
    return name


def numbers(table: str) -> dict[str, int]:
    """The calls of a table that this machine has."""
    column = 1 if machine() == "x86_64" else 2
    rows = [row.split() for row in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def call(name: str, *arguments: int | bytes | ctypes._CData | None) -> int:
    """Make one of `OURS`. Raises OSError with the call's name."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(numbers(OURS)[name]), *words))
    if result < 0:
        raise failed(name)
    return result


def prctl(option: int, argument: int = 0, pointer: ctypes._CData | int = 0) -> None:
    """Raises OSError."""
    third = ctypes.c_ulong(pointer) if isinstance(pointer, int) else pointer
    if _libc.prctl(option, ctypes.c_ulong(argument), third, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise failed(f"prctl({option})")


def failed(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
