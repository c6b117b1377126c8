"""Landlock: the files that a process may open, by path, without any privilege (Linux 5.13).

Landlock does not bound what is not opened: stat, chdir, chmod. The seccomp filter refuses what would change
such a file.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from millrace.devices.syscalls import call

CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
DEVICES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # character device, socket, fifo, block device: none is made
TCP = 0b11
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def abi() -> int:
    """The version that the kernel has. Raises OSError: it has none, or it is switched off."""
    return call("landlock_create_ruleset", None, 0, CREATE_RULESET_VERSION)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """This process and its children open nothing but files below these paths, as far as these exist.

    Raises: OSError: the kernel refuses. `PR_SET_NO_NEW_PRIVS` must be set.
    """
    version = abi()
    files = sum(1 << bit for bit in range(13))
    files |= REFER * (version >= 2) | TRUNCATE * (version >= 3) | IOCTL_DEV * (version >= 5)
    attributes = struct.pack(
        "QQQ", files, TCP * (version >= 4), ABSTRACT_SOCKETS_AND_SIGNALS * (version >= 6)
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call("landlock_create_ruleset", ctypes.create_string_buffer(attributes), size, 0)
    for path in readable:
        _permit(ruleset, path, files & (READ_FILE | READ_DIR | EXECUTE))
    for path in writable:
        _permit(ruleset, path, files & ~(DEVICES | IOCTL_DEV | EXECUTE))
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _permit(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor))
        call("landlock_add_rule", ruleset, RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
