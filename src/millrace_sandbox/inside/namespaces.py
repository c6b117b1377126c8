"""Namespaces: a root directory with the standard library alone, no network, and pids of each program's own.

The warm process enters the first set once: mount, net, ipc, uts (and user, without root). Each program gets
user, pid and mount namespaces of its own inside.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from millrace.devices.syscalls import call
from millrace_sandbox.inside.limits import Limits

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4  # MOUNT_ATTR_*

PRIVATE = "/private"
"""The private directory of a program: its only writable one."""
MOUNT_POINTS = ("/mnt", "/srv", "/media", "/opt", "/tmp", "/home")
"""Where the new root is built, in the mount namespace alone: the first that holds nothing to be shown."""
INNER_ID = 1000
"""User and group of a program inside its user namespace."""


def enter(visible: Sequence[str], proc: int) -> None:
    """Put this process into a root directory that shows `visible` read-only, and cut it from the network.

    Args:
        proc: an open descriptor of /proc, which the new root does not have.
    Raises:
        OSError: the kernel or the container refuses.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWNS | NEWNET | NEWIPC | NEWUTS | (NEWUSER if user else 0))
    if user:
        map_user(proc, (user, user), (group, group))
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = next(path for path in MOUNT_POINTS if os.path.isdir(path) and not _hides(path, visible))
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for path in visible:
        _show(root, path)
    os.mkdir(root + PRIVATE)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(PRIVATE, f"{root}/tmp")
    os.mkdir(f"{root}/old")
    os.chdir(root)
    call("pivot_root", b".", b"old")
    os.chdir("/")
    if ctypes.CDLL(None, use_errno=True).umount2(b"/old", MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount2 of the old root")
    os.rmdir("/old")
    _set_attributes("/", READ_ONLY | NO_SUID, recursive=False)


def _hides(mount_point: str, visible: Iterable[str]) -> bool:
    return any(os.path.commonpath([mount_point, path]) == mount_point for path in visible)


def _show(root: str, path: str) -> None:
    """Bind `path` at the same place below `root`, read-only, or repeat it as a symbolic link."""
    target = root + path
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    is_directory = os.path.isdir(path)
    if is_directory:
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        Path(target).touch(0o644)
    mount(path, target, None, MS_BIND | MS_REC)
    _set_attributes(target, READ_ONLY | NO_SUID | (NO_DEVICES if is_directory else 0), recursive=True)


def for_program(limits: Limits, proc: int) -> None:
    """Give this process user and mount namespaces, and its next child a pid namespace.

    The private directory is mounted, and the current one. Raises: OSError.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWUSER | NEWNS | NEWPID)
    map_user(proc, (INNER_ID, user), (INNER_ID, group))
    # Two more files: the directory itself, and one that the kernel counts.
    options = f"size={limits.disk_bytes},nr_inodes={limits.files + 2},mode=0700"
    mount("tmpfs", PRIVATE, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir(PRIVATE)


def map_user(proc: int, user: tuple[int, int], group: tuple[int, int]) -> None:
    """Each pair is the id inside, and the id outside."""
    rows = {"setgroups": "deny", "uid_map": f"{user[0]} {user[1]} 1", "gid_map": f"{group[0]} {group[1]} 1"}
    for name, text in rows.items():
        descriptor = os.open(f"{os.getpid()}/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *texts, flags, None if options is None else options.encode())


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    packed = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    call("mount_setattr", AT_FDCWD, os.fsencode(path), AT_RECURSIVE if recursive else 0, packed, 32)
