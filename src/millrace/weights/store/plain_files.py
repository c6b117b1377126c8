"""Files in a directory where other users may write too. New files have names that nobody can guess. No link
is followed, and no open waits."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from secrets import token_hex
from typing import Any, BinaryIO

from millrace.core.errors import WeightsError

PARTIAL = ".part"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_KINDS = {stat.S_IFLNK: "link", stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


def create(path: str) -> BinaryIO:
    """A new file. Raises: OSError: the name exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666), "wb")


def put(path: str, chunks: Iterable[Any]) -> None:
    """Write a file completely or not at all, in place of an earlier file. Raises: OSError. WeightsError: the
    name exists and is no file."""
    partial = f"{path}.{token_hex(8)}{PARTIAL}"
    with create(partial) as file:
        try:
            file.writelines(chunks)
            file.flush()
            _refuse_others(path)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


def open_plain(path: str) -> BinaryIO:
    """Open a file to read. Raises: OSError. WeightsError: not a file."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            _refuse_others(path)
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        _refuse_others(path)
    return file


def _refuse_others(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "device")
        raise WeightsError(f"{path} is a {kind}, and must be a file: see who put it there, and remove it")
