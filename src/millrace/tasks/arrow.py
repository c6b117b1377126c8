"""Rows in one Arrow file. Every worker maps the file, so a host has the rows in memory at most once.

Parquet is compressed, so a worker that reads a row at random would decompress thousands, or keep all of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from millrace.core.errors import DataError, boundary
from millrace.core.extras import refuse_missing

Row = dict[str, Any]
MAPPED_BYTES = 32 << 20
"""Parquet with more bytes than this, decompressed, is mapped; less is read into memory."""
BATCH_ROWS = 4096


def cache_directory() -> Path:
    """Beside what Hugging Face's libraries keep: `HF_HOME`, or else `~/.cache/huggingface`."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser().absolute() / "millrace"


class ArrowRows:
    """Rows of a mapped Arrow file. In memory are only the numbers of rows of its batches."""

    def __init__(self, file: Path) -> None:
        refuse_missing("pyarrow", str(file))
        import pyarrow  # type: ignore[import-untyped]

        self._file = file
        source = pyarrow.memory_map(str(file))
        try:
            reader = pyarrow.ipc.open_file(source)
            self._batch = reader.get_batch
            sizes = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
        except pyarrow.ArrowInvalid:  # a stream, as `datasets` writes
            batches = list(pyarrow.ipc.open_stream(source))
            self._batch, sizes = batches.__getitem__, [one.num_rows for one in batches]
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        with boundary(f"{self._file}:{index}", "cannot be read", DataError):
            batch = int(np.searchsorted(self._starts, index, "right")) - 1
            rows = self._batch(batch).slice(index - int(self._starts[batch]), 1).to_pylist()
        return rows[0]

    def place(self, index: int) -> str:
        return str(index)


def write_arrow(path: Path, batches: Iterable[Any], rows_max: int | None = None) -> int:
    """Write Arrow tables or record batches as one file, whole or not at all. Returns the number of rows.

    Each batch gets the columns and types of the first.

    Raises: OSError: it cannot be written. DataError: there are no rows. pyarrow.ArrowInvalid, KeyError: a
    batch has other columns. Nothing is left then.
    """
    refuse_missing("pyarrow", str(path))
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    writer, num_rows = None, 0
    try:
        with open(handle, "wb") as file:
            for batch in batches:
                table = batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_batches([batch])
                table = table.slice(0, None if rows_max is None else rows_max - num_rows)
                if writer is None:
                    schema = table.schema
                    writer = pyarrow.ipc.new_file(file, schema)
                writer.write_table(table.select(schema.names).cast(schema))
                num_rows += table.num_rows
                if num_rows == rows_max:
                    break
            if writer is None or num_rows == 0:
                raise DataError("it has no rows")
            writer.close()
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return num_rows


def mapped_parquet(file: Path) -> ArrowRows | None:
    """The rows of a Parquet file, through an Arrow file in the cache. The Arrow file is of these very bytes:
    the name has the path, size and time of change. None: the file is small, or no cache can be written."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        groups = (parquet.metadata.row_group(n) for n in range(parquet.metadata.num_row_groups))
        if sum(group.total_byte_size for group in groups) <= MAPPED_BYTES:
            return None
        about = file.stat()
        version = f"{file.resolve()}\0{about.st_size}\0{about.st_mtime_ns}"
        digest = xxhash.xxh3_64_hexdigest(version.encode())
        mapped = cache_directory() / f"{file.stem}-{digest}.arrow"
        if not mapped.exists():
            try:
                write_arrow(mapped, parquet.iter_batches(BATCH_ROWS))
            except OSError:
                return None
    return ArrowRows(mapped)
