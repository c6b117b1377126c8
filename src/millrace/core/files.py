"""Files that a stranger may have written. A name in a stranger's run may lead to an endless device, to a pipe
without a writer, or to JSON that is nested too deeply for any stack.

Only a regular file is read, without following links, without waiting, and up to a number of bytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from millrace.core.errors import DataError

BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 16 << 20
NESTING_MAX = 64
"""Levels of objects and arrays in JSON."""


def opened(path: Path | str) -> BinaryIO:
    """The regular file at `path`, to be read. A link is not followed: a run writes none.

    Raises: FileNotFoundError: there is no file. DataError: the file is not regular, or not readable.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        refuse_irregular(path)
        raise DataError(f"{path} cannot be read: {error.strerror}\n  Check its permissions") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        refuse_irregular(path)
    return open(fd, "rb")


def refuse_irregular(path: Path | str) -> None:
    """For callers that open the file by its name. A missing file passes. Raises: DataError."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, and no regular file.\n"
            "  A run writes regular files only: remove it, or put the file in its place"
        )


def read(path: Path | str, bytes_max: int = BYTES_MAX) -> bytes:
    """The content of a file. Raises: as `opened`; DataError: the file has more than `bytes_max` bytes."""
    with opened(path) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise DataError(f"{path} has more than {bytes_max:,} bytes: no run writes so many there")
    return data


def read_json(path: Path | str, bytes_max: int = BYTES_MAX) -> Any:
    """Raises: as `read`; DataError: the file is no JSON, or nested more than `NESTING_MAX` deep."""
    try:
        tree = json.loads(read(path, bytes_max))
        _refuse_deep(tree)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None
    return tree


def others_may_write(path: Path) -> bool:
    """Whether another user owns the file, or may write into it: do not run it as code. Raises: OSError."""
    status = path.stat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def lines(file: BinaryIO, where: object) -> Iterator[bytes]:
    """Lines of an open file, the last one perhaps incomplete. Raises: DataError: a line is too long."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        refuse_long(line, where)
        yield line


def refuse_long(line: bytes, where: object) -> None:
    if len(line) > LINE_BYTES_MAX:
        raise DataError(f"{where}: a line has more than {LINE_BYTES_MAX:,} bytes: no run writes such a line")


def _refuse_deep(tree: Any) -> None:
    level = [tree]
    for _ in range(NESTING_MAX + 1):
        nodes = [node for node in level if isinstance(node, dict | list)]
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return
    raise ValueError(f"it is nested more than {NESTING_MAX} deep")


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
