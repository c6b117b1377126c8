"""Rows of a table of cells (CSV, TSV), which stay on disk."""

from __future__ import annotations

import csv
import io
import mmap
import re
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path

from millrace.core.errors import DataError
from millrace.tasks.row_lines import UTF16, Row, mapped, not_utf8

DELIMITERS = ",;\t|"
_NAMED = re.compile("sep=(.)")
"""A first line of spreadsheets, which names the delimiter."""


class CellRows:
    """A header, and a row of cells in each record. Only the records' positions are in memory, 24 bytes a row.

    The text is UTF-8, or UTF-16 with its mark, as spreadsheets write. The header decides the delimiter. An
    empty cell in a column of `filled` is a gap, None, as a null of JSON.
    """

    def __init__(self, file: Path, filled: Collection[str | None]) -> None:
        self._file, self._bytes, self._filled = file, _utf8(file), filled
        csv.field_size_limit(max(csv.field_size_limit(), len(self._bytes)))
        header = next(filter(str.strip, self._lines()), "")
        named = _NAMED.fullmatch(header.strip())
        self._delimiter = named[1] if named else max(DELIMITERS, key=lambda mark: len(_cells(header, mark)))
        reader = csv.reader(self._lines(), delimiter=self._delimiter)
        self._spans = array("q")  # line, start and end of each row
        records = (cells for cells in reader if any(cells))
        self._names = next(records, [])
        if named:
            self._names = next(records, [])
        self._refuse_names_twice()
        end = self._read
        for cells in reader:
            if cells:
                self._spans.extend((reader.line_num, end, self._read))
            end = self._read
        if len(self):
            self._refuse_open_quotes()

    def _refuse_names_twice(self) -> None:
        if twice := [name for name in self._names if name and self._names.count(name) > 1]:
            raise DataError(f"{self._file} has two columns {twice[0]!r}: give one of them another name")

    def _refuse_open_quotes(self) -> None:
        """Quotes that never close make one cell of all rows behind them."""
        line, start, end = self._spans[-3:]
        text = io.StringIO(self._bytes[start:end].decode(), newline="")
        try:
            next(csv.reader(text, delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise DataError(
                    f"{self._file}: the last row, which ends in line {line}, has quotes that are not closed"
                ) from None

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
        row = dict.fromkeys(self._names) | dict(zip(self._names, cells, strict=False))
        return {name: None if cell == "" and name in self._filled else cell for name, cell in row.items()}

    def place(self, index: int) -> str:
        return str(self._spans[3 * index])


def _cells(header: str, delimiter: str) -> list[str]:
    return next(csv.reader([header], delimiter=delimiter), [])


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
