"""Evaluations in the file. They are never trained on, and have their own accounts.

An evaluation is written whole: its row has the number of its attempts, and the attempts are written with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from millrace.core.types import EvaluationAttempt, EvaluationRecord, Finish
from millrace.ledger.checksums import DamageError, checked
from millrace.ledger.codec import pack_prompt, unpack_prompt
from millrace.ledger.ledger_schema import insert_into, intact
from millrace.ledger.records import encode

_INSERT = insert_into("evaluations")
_INSERT_ATTEMPT = insert_into("evaluation_attempts")
_SELECT = (
    f"SELECT name, version, metrics, reason, took_s, {intact('evaluations')} FROM evaluations"
    " ORDER BY version, rowid"
)
_SELECT_ATTEMPTS = (
    "SELECT prompt_index, row_id, attempt, tokens, finish, reward, answer, reason,"
    f" {intact('evaluation_attempts')} FROM evaluation_attempts WHERE name = ? AND version = ?"
    " ORDER BY prompt_index, attempt"
)
_INCOMPLETE = (
    "SELECT name, version, num_attempts, (SELECT count(*) FROM evaluation_attempts a WHERE a.name = e.name"
    " AND a.version = e.version) AS recorded FROM evaluations e WHERE num_attempts <> recorded LIMIT 1"
)


def insert(
    db: sqlite3.Connection, record: EvaluationRecord, attempts: Sequence[EvaluationAttempt], wall_s: float
) -> None:
    """Write inside a transaction. Raises sqlite3.IntegrityError: the evaluation exists already."""
    key = record.name, record.version
    metrics = encode(record.metrics)
    db.execute(_INSERT, (*key, len(attempts), metrics, record.reason, record.took_s, wall_s))
    db.executemany(_INSERT_ATTEMPT, [(*key, *_row(attempt)) for attempt in attempts])


def load(db: sqlite3.Connection) -> list[EvaluationRecord]:
    """Raises DamageError."""
    evaluations = []
    for row in db.execute(_SELECT):
        name, version, metrics, reason, took_s = checked("evaluations", row)
        evaluations.append(EvaluationRecord(name, version, msgspec.msgpack.decode(metrics), reason, took_s))
    return evaluations


def load_attempts(db: sqlite3.Connection, name: str, version: int) -> list[EvaluationAttempt]:
    """Raises DamageError."""
    attempts = []
    for row in db.execute(_SELECT_ATTEMPTS, (name, version)):
        index, row_id, attempt, tokens, finish, reward, answer, reason = checked("evaluation_attempts", row)
        one = (index, row_id, attempt, unpack_prompt(tokens), Finish(finish), reward, answer, reason)
        attempts.append(EvaluationAttempt(*one))
    return attempts


def refuse_lost(db: sqlite3.Connection) -> None:
    """Check that each evaluation has its attempts. Raises DamageError."""
    row = db.execute(_INCOMPLETE).fetchone()
    if row is not None:
        name, version, due, recorded = row
        raise DamageError(f"evaluation {name} of version {version} has {recorded} of its {due} attempts")


def _row(one: EvaluationAttempt) -> tuple[object, ...]:
    return (
        *(one.prompt_index, one.row_id, one.attempt, pack_prompt(one.tokens), one.finish.value),
        *(one.reward, one.answer, one.reason),
    )
