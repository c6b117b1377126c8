"""Trajectories and batches that cannot be trained on: the reasons, and files of such batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from millrace.core.completion.columns import LOGPROB_MAX, TokenColumns
from millrace.core.errors import writing
from millrace.core.types import Batch

SAVED_MAX = 8  # a run directory keeps the first rejected batches


def impossible_trajectories(batch: Batch, vocabulary: int) -> dict[int, str]:
    """Trajectories that no engine can have sampled, and the reasons. An id beyond the vocabulary would count
    as another position's token."""
    reasons: dict[int, str] = {}
    for sequence in (sequence for group in batch.groups for sequence in group.sequences):
        tokens, logprobs = np.asarray(sequence.columns.tokens), np.asarray(sequence.columns.logprobs)
        for outside in tokens[(tokens < 0) | (tokens >= vocabulary)][:1]:
            reasons[sequence.trajectory_id] = f"token {outside} is outside the vocabulary of {vocabulary}"
        trained = logprobs if sequence.mask is None else logprobs[np.asarray(sequence.mask, bool)]
        for wrong in trained[~(np.isfinite(trained) & (trained <= LOGPROB_MAX))][:1]:
            reasons[sequence.trajectory_id] = f"{wrong:g} is the log-prob of no sampled token"
    return reasons


def save_rejected(batch: Batch, directory: Path) -> str:
    """Save a batch that cannot be trained on. Returns a sentence with the file's name. A repeat has the same
    file. At most SAVED_MAX batches are saved."""
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
    """Plain data for types that msgpack does not know: token columns, and arrays of token ids."""
    if isinstance(columns, TokenColumns):
        shown = {"tokens": columns.tokens, "logprobs": columns.logprobs, "versions": columns.runs}
        return {**shown, "forks": columns.forks} if columns.forks else shown
    return columns.tolist()
