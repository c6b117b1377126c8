"""Rows of data files, by index. All stay on disk but those of .json and of small Parquet files."""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.config.objects import load_function
from millrace.core.errors import DataError, boundary
from millrace.core.extras import refuse_missing
from millrace.tasks.arrow import ArrowRows, mapped_parquet
from millrace.tasks.cells import CellRows
from millrace.tasks.data_files import SUFFIXES, check_exists, format_of, refuse_packed, row_files
from millrace.tasks.row_lines import JsonLines, Row, as_object, not_utf8

FORMATS = f"{', '.join(SUFFIXES)}, a directory of such files, or one from `datasets.save_to_disk`"


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


def open_rows(path: str, filled: Collection[str | None] = ()) -> Rows:
    """The rows of a file, of the files of a directory, or of those of a pattern. `filled`: see `CellRows`.

    Raises:
        DataError: there is no file, or one cannot be read, has no rows, or has an unknown format.
    """
    check_exists(path)
    files = row_files(path)
    parts = []
    for file in files:
        with boundary(str(file), f"cannot be read as {file.suffix or 'a data set'}", DataError):
            parts.append(_open(file, filled))
    if sum(map(len, parts)) == 0:
        raise DataError(f"{path} has no rows: a task needs at least one")
    return parts[0] if files == [Path(path)] else Joined(files, parts)


def _open(file: Path, filled: Collection[str | None]) -> Rows:
    if file.is_dir():
        return _saved(file)
    refuse_packed(file)
    match format_of(file):
        case ".jsonl" | ".ndjson":
            return JsonLines(file)
        case ".json":
            return _json(file)
        case ".csv" | ".tsv":
            return CellRows(file, filled)
        case ".parquet":
            return _parquet(file)
        case ".arrow":
            return ArrowRows(file)
    raise DataError(f"{file}: format {file.suffix!r} is not known. Use {FORMATS}.")


class Joined:
    """The rows of several files, one after the other. A place has the path of its file, from the folder that
    all files share."""

    def __init__(self, files: Sequence[Path], parts: Sequence[Rows]) -> None:
        self._parts, shared = parts, os.path.commonpath([file.parent for file in files])
        self._names = [os.path.relpath(file, shared) for file in files]
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        part = self._part(index)
        return self._parts[part][index - self._starts[part]]

    def place(self, index: int) -> str:
        part = self._part(index)
        return f"{self._names[part]}:{self._parts[part].place(index - self._starts[part])}"

    def _part(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1


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
            return as_object(row, where)

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
        raise not_utf8(str(file), error) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON Lines often have this suffix
            return JsonLines(file)
        raise
    if not isinstance(rows, list):
        raise DataError(
            f"{file} holds a JSON {type(rows).__name__}: expected a list of objects, or use .jsonl"
        )
    return Listed(file, rows)


def _parquet(file: Path) -> Rows:
    refuse_missing("pyarrow", str(file))
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = mapped_parquet(file)
    return rows or Listed(file, _Table(pyarrow.parquet.read_table(file, memory_map=True)))


def _saved(directory: Path) -> Rows:
    refuse_missing("datasets", str(directory))
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(directory))
    if isinstance(loaded, DatasetDict):
        names = sorted(loaded)
        raise DataError(
            f"{directory} holds the splits {names}: set `task.path` to one, {directory / names[0]}"
        )
    return Listed(directory, loaded)
