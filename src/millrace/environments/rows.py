"""Rows of a data file, by index. JSON Lines stay on disk; other formats are read once."""

from __future__ import annotations

import codecs
import csv
import io
import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from millrace.config.objects import load_function
from millrace.core.errors import DataError, boundary

Row = Mapping[str, Any]
FORMATS = (
    ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, or a directory from `datasets.save_to_disk` or with "
    ".parquet files"
)


DELIMITERS = ",;\t|"
_TO_UTF8 = "Write it anew: `iconv -f {} -t utf-8 OLD > NEW`, with its own encoding"


def find_column(row: Row, name: str) -> Any:
    """A column; with a dotted name, such as `reward_model.ground_truth`, a value of its tables. None: no
    value."""
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    inner = row.get(first) if dot else None
    return find_column(inner, rest) if isinstance(inner, Mapping) else None


def has_column(row: Row, name: str) -> bool:
    """Whether the row has the column, also with an empty value."""
    first, dot, rest = name.partition(".")
    inner = row.get(first) if dot else None
    return name in row or (isinstance(inner, Mapping) and has_column(inner, rest))


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Raises DataError: the row is broken; the message names its place."""

    def place(self, index: int) -> str:
        """The place of the row in the file: a line, or an index."""


class FunctionRows:
    """The rows of a user's function `def rows() -> Sequence[dict]`, which returns the same at every call."""

    def __init__(self, path: str) -> None:
        function, _ = load_function("task.path", path)
        self._rows = function()
        if not isinstance(self._rows, Sequence) or not self._rows:
            raise DataError(f"`task.path` ({path}) must return a sequence of at least one row (dict)")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}, not a dict of columns")
        return row

    def place(self, index: int) -> str:
        return str(index)


def open_rows(path: str) -> Rows:
    """The rows of a file or data set directory.

    Raises:
        DataError: the file does not exist, cannot be read, has no rows, or has an unknown format.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"no data at `{path}` (looked in {Path.cwd()}): check `task.path`")
    with boundary(path, f"cannot be read as {file.suffix or 'a data set'}", DataError):
        rows = _open(file)
    if len(rows) == 0:
        raise DataError(f"{path} has no rows: a task needs at least one")
    return rows


def _open(file: Path) -> Rows:
    if file.is_dir():
        return _directory(file)
    match file.suffix:
        case ".jsonl" | ".ndjson":
            return JsonLines(file)
        case ".json":
            return _json(file)
        case ".csv" | ".tsv":
            return _csv(file)
        case ".parquet":
            return _parquet(file)
    raise DataError(f"{file}: format {file.suffix!r} is not known. Use {FORMATS}.")


class JsonLines:
    """One JSON object per line; blank lines do not count. Only the lines' positions are in memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._bytes = b"" if file.stat().st_size == 0 else _mapped(file)
        if self._bytes[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{file} is UTF-16, and lines of JSON are UTF-8.\n  {_TO_UTF8.format('UTF-16')}")
        ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        bounds = np.concatenate([[-1], ends, [len(self._bytes)]])
        spans = zip(bounds[:-1] + 1, bounds[1:], strict=True)
        filled = [(n, int(a), int(b)) for n, (a, b) in enumerate(spans, 1) if self._bytes[a:b].strip()]
        self._spans = np.array(filled, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Row:
        line, start, end = self._spans[index]
        try:
            row = json.loads(self._bytes[start:end])
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{self._file}:{line}", error) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._file}:{line} is not JSON: {error}") from error
        return _object(row, f"{self._file}:{line}")

    def place(self, index: int) -> str:
        return str(self._spans[index][0])


class Listed:
    """Rows in memory, or in a table that returns a row as a dict."""

    def __init__(self, file: Path, rows: Any, places: list[int] | None = None) -> None:
        self._file, self._rows, self._places = file, rows, places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        where = f"{self._file}:{self.place(index)}"
        with boundary(where, "cannot be read", DataError):
            row = self._rows[index]
            if isinstance(row, DataError):
                raise row
            return _object(row, where)

    def place(self, index: int) -> str:
        return str(index if self._places is None else self._places[index])


class _Table:
    """An Arrow table, a row at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]


def _json(file: Path) -> Rows:
    try:
        rows = json.loads(file.read_bytes())
    except UnicodeDecodeError as error:
        raise _not_utf8(str(file), error) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{file} holds a JSON {type(rows).__name__}: expected a list of objects, or use .jsonl"
        )
    return Listed(file, rows)


def _csv(file: Path) -> Rows:
    """Rows in UTF-8, or in UTF-16 with its mark, as spreadsheets write. The header decides the delimiter."""
    content = file.read_bytes()
    utf16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{file}:{content[: error.start].count(10) + 1}", error) from error
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
    rows: list[Row | DataError] = []
    lines: list[int] = []
    for row in reader:
        lines.append(reader.line_num)
        rows.append(_too_wide(file, reader) if None in row else row)
    return Listed(file, rows, lines)


def _delimiter(text: str) -> str:
    header = text.partition("\n")[0]
    return max(DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))


def _too_wide(file: Path, reader: csv.DictReader[str]) -> DataError:
    return DataError(
        f"{file}:{reader.line_num} has more cells than the header, {reader.fieldnames}: text with "
        f"{reader.reader.dialect.delimiter!r} in it needs quotes"
    )


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} is not UTF-8: byte {error.object[error.start]:#04x}, {error.reason}.\n"
        f"  {_TO_UTF8.format('latin1')}"
    )


def _parquet(file: Path) -> Rows:
    import pyarrow.parquet  # type: ignore[import-untyped]

    return Listed(file, _Table(pyarrow.parquet.read_table(file, memory_map=True)))


def _directory(directory: Path) -> Rows:
    if (directory / "dataset_dict.json").exists() or (directory / "dataset_info.json").exists():
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(str(directory))
        if isinstance(loaded, DatasetDict):
            names = sorted(loaded)
            raise DataError(
                f"{directory} holds the splits {names}: set `task.path` to one, {directory / names[0]}"
            )
        return Listed(directory, loaded)
    files = sorted(directory.rglob("*.parquet"))
    if not files:
        raise DataError(f"{directory} is not a data set that can be read. Use {FORMATS}.")
    import pyarrow
    import pyarrow.parquet

    tables = [pyarrow.parquet.read_table(file, memory_map=True) for file in files]
    return Listed(directory, _Table(pyarrow.concat_tables(tables, promote_options="default")))


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object with columns")
    return row
