"""The completions of an evaluation while training, to read. An episode comes turn by turn."""

from __future__ import annotations

from typing import Any

from millrace.core.completion.marked import unmarked
from millrace.core.errors import DataError
from millrace.core.types import EvaluationAttempt
from millrace.ledger.reading.reader import LedgerReader
from millrace.observe.conversation import conversation
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.record.views import View, tokenizer_of


def completions_view(reader: LedgerReader, run: RunDirectory, name: str) -> list[View]:
    """Of the newest version that evaluation `name` has measured. Raises: DataError: there is none."""
    records = reader.evaluations()
    versions = [one.version for one in records if one.name == name and not one.reason]
    if not versions:
        names = ", ".join(sorted({one.name for one in records if not one.reason})) or "none"
        raise DataError(f"{run.path} has no completions of an evaluation {name!r}: it has those of {names}")
    return completions_of(reader, name, max(versions), tokenizer_of(run))


def completions_of(reader: LedgerReader, name: str, version: int, tokenizer: Any | None) -> list[View]:
    return [_completion(one, version, tokenizer) for one in reader.attempts(name, version)]


def _completion(one: EvaluationAttempt, version: int, tokenizer: Any | None) -> View:
    columns = unmarked(one.tokens, version)
    turns = [] if columns.sampled() is None else conversation(columns, {}, tokenizer and tokenizer.decode)
    return {
        "row_id": one.row_id,
        "attempt": one.attempt,
        "version": version,
        "reward": one.reward,
        "reason": one.reason,
        "finish": one.finish.value,
        "num_tokens": len(columns),
        "completion": tokenizer.decode(columns.tokens.tolist()) if tokenizer else None,
        **({"turns": turns} if turns else {}),
    }
