"""What a curation has computed at a cost, in a ledger: attempts at rows with their tokens and rewards.

A chunk of rows is one evaluation of the ledger: written whole, durably, and once. So after kill -9 a chunk is
there or not, and a row that is there is not computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.core.errors import DataError
from millrace.core.types import EvaluationAttempt, EvaluationRecord
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader


class AttemptsByRow:
    """One kind of attempts ("gold", "samples") of a curation, by row. See `attempt_ledger`."""

    def __init__(self, path: Path, ledger: SqliteLedger, kind: str) -> None:
        self._ledger, self._kind = ledger, kind
        self.by_row: dict[int, list[EvaluationAttempt]] = defaultdict(list)
        names = [one.name for one in ledger.evaluations() if one.name.partition(" ")[0] == kind]
        if names:
            with LedgerReader(path) as reader:
                for name in names:
                    self._add(reader.attempts(name, 0))

    def keep(self, attempts: Sequence[EvaluationAttempt]) -> None:
        """Record every attempt at some rows, durably. `prompt_index` is the number of a row.

        Raises: LedgerError: a row is recorded already; the disk is full.
        """
        rows = sorted({one.prompt_index for one in attempts})
        assert not self.by_row.keys() & set(rows), rows
        self._ledger.evaluated(EvaluationRecord(f"{self._kind} {rows[0]}", 0), attempts)
        self._add(attempts)

    def _add(self, attempts: Sequence[EvaluationAttempt]) -> None:
        for one in attempts:
            self.by_row[one.prompt_index].append(one)


@contextmanager
def attempt_ledger(path: Path, about: Mapping[str, Any]) -> Iterator[SqliteLedger]:
    """The ledger of a curation, made if there is none. `about` is all that decides its attempts.

    Raises:
        DataError: the file is of a curation with another model, data set, reward or sampling.
        LedgerError: another process works on it; it is damaged.
    """
    ledger = SqliteLedger(path, run=dict(about))
    try:
        before = {key: value for key, value in ledger.run.items() if key in about}
        changed = [
            f"  {key}: {before.get(key)} -> {value}"
            for key, value in about.items()
            if before.get(key) != value
        ]
        if changed:
            raise DataError(
                f"{path} has attempts that were made otherwise:\n"
                + "\n".join(changed)
                + "\n  Put that back, or name another directory with --out"
            )
        yield ledger
    finally:
        ledger.close()
