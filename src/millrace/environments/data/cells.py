"""Rows of a table of cells (CSV, TSV), which stay on disk."""

from __future__ import annotations

import csv
import io
import mmap
from array import array
from collections.abc import Iterator
from pathlib import Path

from millrace.core.errors import DataError
from millrace.environments.data.lines import UTF16, Row, mapped, not_utf8

DELIMITERS = ",;\t|"


class CellRows:
    """A header, and a row of cells in each record. Only the records' positions are in memory, 24 bytes a row.

    The text is UTF-8, or UTF-16 with its mark, as spreadsheets write. The header decides the delimiter.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._bytes = file, _utf8(file)
        lines = self._lines()
        header = next(lines, "")
        self._delimiter = max(
            DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), []))
        )
        reader = csv.reader(self._lines(), delimiter=self._delimiter)
        self._spans = array("q")  # line, start and end of each row
        self._names, end = next(reader, []), self._read
        for cells in reader:
            if cells:
                self._spans.extend((reader.line_num, end, self._read))
            end = self._read

    def _lines(self) -> Iterator[str]:
        """The text by lines. `_read` is the number of bytes of those that were given."""
        self._read = 0
        for number, line in enumerate(_split(self._bytes), 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(f"{self._file}:{number}", error) from error
            self._read += len(line)
            yield text

    def __len__(self) -> int:
        return len(self._spans) // 3

    def __getitem__(self, index: int) -> Row:
        line, start, end = self._spans[3 * index : 3 * index + 3]
        text = io.StringIO(self._bytes[start:end].decode(), newline="")
        cells = next(csv.reader(text, delimiter=self._delimiter))
        if len(cells) > len(self._names):
            raise DataError(
                f"{self._file}:{line} has more cells than the header, {self._names}: text with "
                f"{self._delimiter!r} in it needs quotes"
            )
        return dict.fromkeys(self._names) | dict(zip(self._names, cells, strict=False))

    def place(self, index: int) -> str:
        return str(self._spans[3 * index])


def _split(content: mmap.mmap | bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start) + 1 or len(content)
        yield content[start:end]
        start = end


def _utf8(file: Path) -> mmap.mmap | bytes:
    """The file as it is, where its lines end with a line feed. Other files are rewritten in memory."""
    content = mapped(file)
    if content[:2] in UTF16:
        return bytes(content).decode("utf-16").encode()
    if content.find(b"\n") < 0 <= content.find(b"\r"):
        return bytes(content).replace(b"\r", b"\n")
    return content
