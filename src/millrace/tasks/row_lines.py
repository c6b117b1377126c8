"""Rows of JSON Lines, which stay on disk."""

from __future__ import annotations

import codecs
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millrace.core.errors import DataError

Row = Mapping[str, Any]
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_TO_UTF8 = "Write it anew: `iconv -f {} -t utf-8 OLD > NEW`, with its own encoding"
_SCANNED_BYTES = 1 << 20


class JsonLines:
    """One JSON object per line; blank lines do not count. Only the lines' positions are in memory, 24 bytes a
    row."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._bytes = mapped(file)
        if self._bytes[:2] in UTF16:
            raise DataError(f"{file} is UTF-16, and lines of JSON are UTF-8.\n  {_TO_UTF8.format('UTF-16')}")
        ends = _line_ends(self._bytes)
        starts = np.concatenate([[0], ends + 1])
        ends = np.concatenate([ends, [len(self._bytes)]])
        filled = np.fromiter(
            (bool(self._bytes[a:b].strip()) for a, b in zip(starts, ends, strict=True)), bool, len(starts)
        )
        lines = np.arange(1, len(starts) + 1)
        self._spans = np.stack([lines, starts, ends], axis=1)[filled]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Row:
        line, start, end = self._spans[index]
        try:
            row = json.loads(self._bytes[start:end])
        except UnicodeDecodeError as error:
            raise not_utf8(f"{self._file}:{line}", error) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._file}:{line} is not JSON: {error}") from error
        return as_object(row, f"{self._file}:{line}")

    def place(self, index: int) -> str:
        return str(self._spans[index][0])


def mapped(file: Path) -> mmap.mmap | bytes:
    """The bytes of a file, which all processes share."""
    if file.stat().st_size == 0:
        return b""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def as_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object with columns")
    return row


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} is not UTF-8: byte {error.object[error.start]:#04x}, {error.reason}.\n"
        f"  {_TO_UTF8.format('latin1')}"
    )


def _line_ends(data: mmap.mmap | bytes) -> np.ndarray:
    """A line ends with a line feed, or with a carriage return in a file without any line feed. No string of
    JSON has one of them, and strings may have every other separator of Unicode."""
    end = ord("\r" if data.find(b"\n") < 0 else "\n")
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(data), _SCANNED_BYTES):
        block = np.frombuffer(data[start : start + _SCANNED_BYTES], np.uint8)
        parts.append(np.flatnonzero(block == end) + start)
    return np.concatenate(parts)
