"""A log in several files, its parts. A long part gets a number, and a new part begins (rotation).

`events.jsonl` is the newest part; `events.000001.jsonl` is the oldest. Readers read all parts as one log.
The handlers of `logging` rename every older part at each rotation, so a reader would lose its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from millrace.core import files
from millrace.core.errors import writing

PART_BYTES = 32 << 20
"""The size at which the newest part is rotated."""
SLICE_BYTES = 4 << 20
"""The most bytes that a follower reads at once."""

_TRAJECTORY = tuple(
    f'{{"kind":"{kind}"'.encode() for kind in ("admitted", "beginning", "leased", "finished", "observed")
)
_PARTIAL = ".partial"
_SCORED, _WELL = b'{"kind":"scored"', b'"outcome":"scored"'


def parts(path: Path) -> list[Path]:
    """The files of the log `path` that exist, oldest first."""
    older = [part for part in path.parent.glob(f"{path.stem}.*{path.suffix}") if _number(part)]
    return [*sorted(older, key=_number), *([path] if path.exists() else [])]


@contextmanager
def opened(path: Path) -> Iterator[Sequence[tuple[Path, BinaryIO]]]:
    """All parts at one moment, oldest first. Raises OSError: there is no log. DataError: as
    `files.opened`."""
    while True:
        with ExitStack() as stack:
            names = parts(path) or [path]
            try:
                opened_parts = [(name, stack.enter_context(files.opened(name))) for name in names]
            except FileNotFoundError:
                if names == [path]:
                    raise
                continue  # a part was rotated just now
            if parts(path) == names:
                yield opened_parts
                return


def rotate(path: Path) -> None:
    """Give the newest part a number, and condense the part before it. If the disk has no room for that, the
    part before stays whole.

    Raises: StorageError.
    """
    older = [part for part in parts(path) if part != path]
    number = _number(older[-1]) + 1 if older else 1
    with writing(path):
        os.rename(path, path.with_name(f"{path.stem}.{number:06d}{path.suffix}"))
    if older:
        with suppress(OSError):
            condense(older[-1])
        with suppress(OSError):
            _partial(older[-1]).unlink(missing_ok=True)


def condense(part: Path) -> None:
    """Leave out events of single trajectories, but not of failed rewards. A crash leaves the part whole."""
    partial = _partial(part)
    with part.open("rb") as lines, partial.open("wb") as kept:
        os.fchmod(kept.fileno(), 0o600)
        kept.writelines(
            line
            for line in lines
            if not line.startswith(_TRAJECTORY) and not (line.startswith(_SCORED) and _WELL in line)
        )
    os.replace(partial, part)


def remove_left_over(path: Path) -> None:
    """Remove the file that a process left when it was killed while it condensed a part. Nobody may write the
    log."""
    for partial in path.parent.glob(f"{path.stem}.*{path.suffix}{_PARTIAL}"):
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _partial(part: Path) -> Path:
    return part.with_name(part.name + _PARTIAL)


class Tail:
    """Whole lines of a log to which another process appends, each once: all lines, or those after byte
    `position` of the newest part. `position` advances in the part that is being read."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path, self.position = path, position
        # Of the part that is being read; None before the first.
        self._inode: int | None = self._stat(path)[0] if position else None

    def take(self, bytes_max: int = SLICE_BYTES) -> list[bytes]:
        """Lines since the last call, of about `bytes_max` bytes; none while there is no file or no further
        line.

        Raises: DataError: as `files.opened`, or a line is too long.
        """
        lines: list[bytes] = []
        if self.is_lost:
            self._inode, self.position = self._stat(self._path)[0], 0
        for part in self._unread():
            try:
                data = self._read(part, bytes_max)
            except FileNotFoundError:
                break  # the part was rotated just now: the next call reads it
            lines += data.splitlines()
            bytes_max -= len(data)
            if bytes_max <= 0:
                break
        return lines

    @property
    def is_lost(self) -> bool:
        """The part that was being read was condensed, or another log replaced it."""
        unread = self._unread()
        return self._inode is not None and (not unread or self._stat(unread[0])[1] < self.position)

    @property
    def behind_bytes(self) -> int:
        return sum(self._stat(part)[1] for part in self._unread()) - self.position

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(self._stat(part)[1] for part in parts(self._path))

    def _unread(self) -> list[Path]:
        """The part that is being read and later parts; all parts before the first read."""
        if self._inode is not None and self._stat(self._path)[0] == self._inode:
            return [self._path]
        names = parts(self._path)
        if self._inode is None:
            return names
        inodes = [self._stat(name)[0] for name in names]
        return names[inodes.index(self._inode) :] if self._inode in inodes else []

    def _read(self, part: Path, bytes_max: int) -> bytes:
        """Whole lines of `part`."""
        with files.opened(part) as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inode not in (None, inode):
                self.position = 0
            self._inode = inode
            file.seek(self.position)
            data = file.read(bytes_max)
            last = file.readline(files.LINE_BYTES_MAX + 1)
            files.refuse_long(last, part)
            data += last
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        return whole

    def _stat(self, part: Path) -> tuple[int, int]:
        """(inode, bytes); zeros if the file does not exist."""
        try:
            status = os.stat(part)
        except FileNotFoundError:
            return 0, 0
        return status.st_ino, status.st_size


def _number(part: Path) -> int:
    """The number of a rotated part; 0: `part` is not rotated."""
    digits = part.name.split(".")[-2] if part.name.count(".") >= 2 else ""
    return int(digits) if digits.isdecimal() else 0
