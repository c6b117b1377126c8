"""Batches that cannot be trained on, kept to be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from millrace.core.columns import TokenColumns
from millrace.core.errors import writing
from millrace.core.types import Batch

SAVED_MAX = 8  # that a run directory keeps, the first ones


def save_rejected(batch: Batch, directory: Path) -> str:
    """Save a batch that cannot be trained on, and say where. A repeat is the same file; at most SAVED_MAX."""
    ids = [s.trajectory_id for group in batch.groups for s in group.sequences]
    name = f"rejected_v{batch.version}_{xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(ids))}.msgpack"
    others = [path for path in directory.glob("rejected_v*.msgpack") if path.name != name]
    if len(others) >= SAVED_MAX:
        return f"the batch is not saved: {SAVED_MAX} are"
    with writing(directory / name):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(msgspec.msgpack.encode(batch, enc_hook=_plain))
    return f"the batch is saved as {name}"


def _plain(columns: Any) -> Any:
    """Of what msgpack does not know: token columns, and arrays of token ids."""
    if isinstance(columns, TokenColumns):
        return {"tokens": columns.tokens, "logprobs": columns.logprobs, "versions": columns.runs}
    return columns.tolist()
