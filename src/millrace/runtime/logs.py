"""What workers print, in files that do not grow for ever: a reward may print without end.

A log that is too long keeps its last part as NAME.EPOCH.log.1, and begins again. Its writers hold it open for
appending, so they go on at its new end. The handlers of `logging` bound only what is logged through them.
"""

from __future__ import annotations

import os
from pathlib import Path

LOG_LOOK_S = 0.5  # between two looks at the length of a log
LOG_BYTES_MAX = 16 << 20
KEPT_BYTES = 8 << 20
KEPT_LOGS = 20
"""Incarnations of one worker whose logs stay: the newest."""

_COPY_BYTES = 1 << 20


def open_log(directory: Path, stem: str, epoch: int) -> tuple[Path, int]:
    """A worker's log STEM.EPOCH.log and a descriptor to append to it; the logs of its oldest incarnations go.

    Raises: OSError: it cannot be made, or is a symbolic link.
    """
    directory.mkdir(parents=True, exist_ok=True)
    logs = sorted(directory.glob(f"{stem}.*[0-9].log"), key=_epoch)
    for log in logs[: max(0, len(logs) + 1 - KEPT_LOGS)]:
        log.unlink()
        _previous(log).unlink(missing_ok=True)
    path = directory / f"{stem}.{epoch}.log"
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)


def bound_log(path: Path, bytes_max: int = LOG_BYTES_MAX, kept_bytes: int = KEPT_BYTES) -> None:
    """Cut a log that is longer than `bytes_max`. One that is gone is left alone."""
    try:
        if path.stat().st_size <= bytes_max:
            return
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        _cut(fd, _previous(path), kept_bytes)
    finally:
        os.close(fd)


def _cut(fd: int, previous: Path, kept_bytes: int) -> None:
    start = os.fstat(fd).st_size - kept_bytes
    previous.unlink(missing_ok=True)
    into = os.open(previous, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for offset in range(start, start + kept_bytes, _COPY_BYTES):
            os.write(into, os.pread(fd, min(_COPY_BYTES, start + kept_bytes - offset), offset))
    finally:
        os.close(into)
    os.ftruncate(fd, 0)
    os.write(fd, f"(too long: the last {kept_bytes:,} bytes are in {previous.name})\n".encode())


def _epoch(log: Path) -> int:
    number = log.name.split(".")[-2]
    return int(number) if number.isdecimal() else 0


def _previous(log: Path) -> Path:
    return log.with_name(log.name + ".1")
