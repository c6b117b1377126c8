"""Filters that need no model. Each returns the rows to drop, by index, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millrace_curation.candidate import CandidateRow, Dropped, Reason
from millrace_curation.minhash import near_earlier
from millrace_curation.words import figures_of, normalized, runs_of, without_frames, words_of

NEAR_WORDS = 2
"""Words of a run whose sets near copies share."""
FRAME_SHARE = 0.05
"""Runs of words in more rows than this are a frame."""

Drops = dict[int, Dropped]
Candidates = Sequence[CandidateRow]


def broken(rows: Candidates) -> Drops:
    """Rows that make no prompt: no JSON, a missing column, a template that cannot be filled."""
    return {row.index: Dropped(Reason.BROKEN, row.fault) for row in rows if row.fault}


def empty(rows: Candidates) -> Drops:
    """Rows without a visible character in the prompt, or in the answer where rows have answers."""
    drops = {}
    for row in rows:
        if not row.text.strip() or not row.tokens:
            drops[row.index] = Dropped(Reason.EMPTY, "the prompt")
        elif row.answer is not None and not row.answer.strip():
            drops[row.index] = Dropped(Reason.EMPTY, "the answer")
    return drops


def lengths(rows: Candidates, least: int, most: int) -> Drops:
    """Rows with fewer than `least` or more than `most` tokens in the prompt."""
    drops = {}
    for row in rows:
        num = len(row.tokens)
        if num > most:
            drops[row.index] = Dropped(Reason.TOO_LONG, f"{num} tokens, at most {most}")
        elif num < least:
            drops[row.index] = Dropped(Reason.TOO_SHORT, f"{num} tokens, at least {least}")
    return drops


def duplicates(rows: Candidates) -> Drops:
    """Rows with the text of an earlier row. Case, width and white space make no difference."""
    first: dict[str, CandidateRow] = {}
    drops = {}
    for row in rows:
        earlier = first.setdefault(normalized(row.text), row)
        if earlier is not row:
            drops[row.index] = Dropped(Reason.DUPLICATE, f"of {earlier.row_id}{_other_answer(row, earlier)}")
    return drops


def near_duplicates(rows: Candidates, threshold: float) -> Drops:
    """Rows whose pairs of words are those of an earlier row, up to a similarity of `threshold`.

    Rows with other numbers or signs of arithmetic are never near: they ask for another answer. Words of a
    frame around very many rows do not count, unless a row has no others.
    """
    words = [words_of(row.text) for row in rows]
    filled = [place for place, one in enumerate(words) if one]
    texts = without_frames([words[place] for place in filled], FRAME_SHARE)
    sets = [np.unique(runs_of(text, NEAR_WORDS)) for text in texts]
    near = near_earlier(sets, [figures_of(words[place]) for place in filled], threshold)
    drops = {}
    for place, (other, share) in near.items():
        row, earlier = rows[filled[place]], rows[filled[other]]
        detail = f"{share:.2f} of {earlier.row_id}{_other_answer(row, earlier)}"
        drops[row.index] = Dropped(Reason.NEAR_DUPLICATE, detail)
    return drops


def _other_answer(row: CandidateRow, earlier: CandidateRow) -> str:
    same = row.answer is None or normalized(row.answer) == normalized(earlier.answer or "")
    return "" if same else f", with another answer: {row.answer!r}, not {earlier.answer!r}"
