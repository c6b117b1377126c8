"""The files of a curation: every row with its measures, the kept rows for a task, and a summary."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.core.errors import OTHER_FILE, writing
from millrace.estimates.interval import of_shares
from millrace_curation.candidate import CandidateRow, Reason, kept_columns, shown_columns
from millrace_curation.curate import Curation, CurationOptions
from millrace_curation.row_measures import BANDS, GOLD

ROWS, KEPT, SUMMARY, PAGE, ATTEMPTS = (
    "rows.parquet",
    "kept.jsonl",
    "curation.json",
    "curation.html",
    "attempts.sqlite",
)
EXAMPLES = 10
"""Dropped rows that the summary shows of each reason."""
BINS = 12
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def write_rows(curation: Curation, directory: Path) -> None:
    """Write `rows.parquet` and `kept.jsonl`, each whole or not at all.

    Raises: DataError: JSON cannot represent a value of a kept row. StorageError: the disk is full.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    lines = [json.dumps(kept_columns(row)) for row in curation.kept]
    with _replaced(directory / KEPT) as path:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    records = [_record(row, curation) for row in curation.rows]
    with _replaced(directory / ROWS) as path:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records, _schema(pyarrow)), path)


def write_summary(summary: Mapping[str, Any], directory: Path) -> None:
    with _replaced(directory / SUMMARY) as path:
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def summarized(curation: Curation, options: CurationOptions, about: Mapping[str, Any]) -> dict[str, Any]:
    """The curation as JSON types. `about` comes first: the task and the model."""
    return {
        **about,
        "num_rows": len(curation.rows),
        "num_kept": len(curation.kept),
        "reasons": {str(reason): count for reason, count in curation.reasons().items()},
        "prompt_tokens": _quantiles([len(row.tokens) for row in curation.kept]),
        "prompt_token_counts": _bins([len(row.tokens) for row in curation.kept]),
        "num_golds_checked": len(curation.golds),
        "pass_rates": _pass_rates(curation, options) if curation.rates else None,
        "examples": {str(reason): list(_examples(curation, reason)) for reason in curation.reasons()},
    }


def _pass_rates(curation: Curation, options: CurationOptions) -> dict[str, Any]:
    rates = [rate for rate in curation.rates.values() if rate.rate is not None]
    low, high = of_shares([rate.rate or 0.0 for rate in rates])
    histogram = [0] * (options.samples + 1)
    for rate in rates:
        histogram[round((rate.rate or 0.0) * options.samples)] += 1
    return {
        "samples": options.samples,
        "correct_at": options.correct_at,
        "num_rows": len(rates),
        "mean": sum(rate.rate or 0.0 for rate in rates) / len(rates) if rates else None,
        "interval": [low, high] if rates else None,
        "histogram": histogram,
        "bands": {band: sum(rate.band == band for rate in rates) for band in BANDS},
        "unscored": sum(rate.unscored for rate in curation.rates.values()),
        "truncated": sum(rate.truncated for rate in curation.rates.values()),
    }


def _examples(curation: Curation, reason: Reason) -> Iterator[dict[str, str]]:
    chosen = [(index, drop) for index, drop in sorted(curation.drops.items()) if drop.reason is reason]
    for index, drop in chosen[:EXAMPLES]:
        yield {
            "row": curation.rows[index].row_id,
            "detail": drop.detail,
            "text": curation.rows[index].text[:200],
        }


def _quantiles(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {f"{share:g}": ordered[round(share * (len(ordered) - 1))] for share in SHARES} if ordered else {}


def _bins(values: list[int]) -> list[list[int]]:
    """(first, last, count) of at most `BINS` bins of equal width over the values."""
    if not values:
        return []
    low = min(values)
    width = max(1, -(-(max(values) - low + 1) // BINS))
    counts = Counter((value - low) // width for value in values)
    return [[low + n * width, low + (n + 1) * width - 1, counts[n]] for n in range(max(counts) + 1)]


def _record(row: CandidateRow, curation: Curation) -> dict[str, Any]:
    drop, rate = curation.drops.get(row.index), curation.rates.get(row.index)
    gold = curation.golds.get(row.index, {}).get(GOLD)
    low, high = rate.interval if rate else (None, None)
    return {
        "row": row.index,
        "row_id": row.row_id,
        "kept": drop is None,
        "reason": str(drop.reason) if drop else "",
        "detail": drop.detail if drop else "",
        "prompt": row.prompt.encode(errors="replace").decode(),
        "answer": row.answer and row.answer.encode(errors="replace").decode(),
        "prompt_tokens": len(row.tokens),
        "gold_reward": gold.reward if gold else None,
        "samples": rate.scored + rate.unscored if rate else None,
        "scored": rate.scored if rate else None,
        "correct": rate.correct if rate else None,
        "truncated": rate.truncated if rate else None,
        "pass_rate": rate.rate if rate else None,
        "pass_rate_low": low,
        "pass_rate_high": high,
        "band": rate.band if rate else None,
        "reward_mean": rate.reward_mean if rate else None,
        "columns": json.dumps(shown_columns(row)),
    }


def _schema(pyarrow: Any) -> Any:
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    kinds = {"kept": pyarrow.bool_()}
    kinds |= dict.fromkeys(("row", "prompt_tokens", "samples", "scored", "correct", "truncated"), number)
    kinds |= dict.fromkeys(
        ("gold_reward", "pass_rate", "pass_rate_low", "pass_rate_high", "reward_mean"), real
    )
    order = _record(CandidateRow(0, ""), Curation([]))
    return pyarrow.schema([(name, kinds.get(name, text)) for name in order])


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A path to write; the file gets its name when it is whole."""
    new = path.with_name(f"{path.name}.new")
    with writing(path, OTHER_FILE):
        yield new
        os.replace(new, path)
