"""Filters that need no model. Each returns the rows to drop, by index, with the reason. Pure.

**Contamination.** To train on rows that repeat a text of an evaluation would make the evaluation worthless. A
row is contaminated if at least `COVERED` of the words of an evaluation's text are in the row, in runs of
`length` words or more. A shorter text must be in the row whole, and a text of fewer than `SHORTEST` words
must be the row. Runs of words that are in very many rows are frames, and do not count.

Source:
    Tulu 3, arXiv:2411.15124, section 3.2 (8 words, half of the text); GPT-3, arXiv:2005.14165, appendix C
    (13 words).

**MinHash** with banded hashing finds similar sets among very many without comparing all pairs.

    P(one value of the signatures is equal) = J(A, B) = |A and B| / |A or B|
    P(a pair with similarity s shares a band) = 1 - (1 - s^rows)^bands

Source:
    Broder, On the resemblance and containment of documents, 1997; Leskovec, Rajaraman and Ullman, Mining of
    Massive Datasets, section 3.4. Unlike there, a pair that shares a band is compared exactly.

The package `datasketch` (2.0) could make signatures and buckets. With the bands of `rows_per_band` it finds
the same rows: 20,000 made-up texts, six thresholds. With bands of its own it misses 135 of 688 rows at 0.8.
So that rule and the comparison would stay, and 30 lines of code would take the place of 43. It needs scipy,
of 140 MB, and a plain install could not curate. So this stays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace_curation.candidate import CandidateRow, Dropped, Reason
from millrace_curation.words import (
    COMMON_ROWS,
    Hashes,
    figures_of,
    normalized,
    runs_of,
    without_frames,
    words_of,
)

NEAR_WORDS = 2
"""Words of a run whose sets near copies share."""
DUPLICATES_FRAME_SHARE = 0.05
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
    texts = without_frames([words[place] for place in filled], DUPLICATES_FRAME_SHARE)
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


# ---------------------------------------------------------------- contamination


COVERED = 0.5
SHORTEST = 5
FRAME_SHARE = 0.01
"""Runs of words in more rows than this do not count."""
DETAIL_CHARACTERS = 200

Run = tuple[int, int]
"""The number of words of a run, and their hash."""


class EvaluationText(NamedTuple):
    """A text that the model is evaluated on. `source` names its file and row."""

    source: str
    text: str


def contaminated(
    rows: Sequence[CandidateRow], evaluations: Sequence[EvaluationText], length: int
) -> dict[int, Dropped]:
    """Rows with a text of an evaluation in them. The detail has the longest run of words that both have."""
    texts = [words_of(one.text) for one in evaluations]
    places = _places(texts, length)
    sizes = sorted({size for size, _ in places})
    whole = {tuple(words): number for number, words in enumerate(texts) if 0 < len(words) < SHORTEST}
    hits = {}  # by row: its runs that an evaluation has
    drops = {}
    for row in rows:
        words = words_of(row.text)
        if (number := whole.get(tuple(words))) is not None:
            drops[row.index] = _dropped(words, 1.0, evaluations[number])
        else:
            hits[row.index] = [run for run in _runs(words, sizes) if run in places]
    frames = _frames(hits, len(rows))
    framed = [_covered(words, length, frames) for words in texts]
    for index, runs in hits.items():
        share, number, covered = _best([run for run in runs if run not in frames], places, texts, framed)
        if share >= COVERED:
            drops[index] = _dropped(_longest(texts[number], covered), share, evaluations[number])
    return drops


def _places(texts: Sequence[Sequence[str]], length: int) -> dict[Run, list[tuple[int, int]]]:
    """The text and the first word of each run. A text of fewer than `length` words is one run."""
    places = defaultdict(list)
    for number, words in enumerate(texts):
        size = min(length, len(words))
        if len(words) >= min(length, SHORTEST):
            for start, run in enumerate(runs_of(words, size).tolist()):
                places[size, run].append((number, start))
    return dict(places)


def _runs(words: Sequence[str], sizes: Sequence[int]) -> Iterator[Run]:
    for size in sizes:
        if len(words) >= size:
            yield from ((size, run) for run in dict.fromkeys(runs_of(words, size).tolist()))


def _frames(hits: dict[int, list[Run]], num_rows: int) -> set[Run]:
    counts = Counter(run for runs in hits.values() for run in runs)
    return {run for run, count in counts.items() if count > max(COMMON_ROWS, FRAME_SHARE * num_rows)}


def _covered(words: Sequence[str], length: int, runs: set[Run]) -> set[int]:
    """Places of the words of a text that are in one of the `runs`."""
    size = min(length, len(words))
    starts = [start for start, run in enumerate(runs_of(words, size).tolist()) if (size, run) in runs]
    return {start + step for start in starts for step in range(size)}


def _best(
    runs: Sequence[Run],
    places: dict[Run, list[tuple[int, int]]],
    texts: Sequence[Sequence[str]],
    framed: Sequence[set[int]],
) -> tuple[float, int, set[int]]:
    """Of the text that the runs cover most: the share of its words outside frames, its number, and the places
    of the words."""
    covered: dict[int, set[int]] = defaultdict(set)
    for run in runs:
        for number, start in places[run]:
            covered[number].update(range(start, start + run[0]))
    best: tuple[float, int, set[int]] = 0.0, 0, set()
    for number, words in covered.items():
        share = len(words - framed[number]) / max(1, len(texts[number]) - len(framed[number]))
        if share > best[0]:
            best = share, number, words
    return best


def _longest(words: Sequence[str], places: set[int]) -> Sequence[str]:
    """The longest run of the words at `places`."""
    best = start = end = 0
    for place in range(len(words) + 1):
        if place not in places:
            if place - start > end - best:
                best, end = start, place
            start = place + 1
    return words[best:end]


def _dropped(words: Sequence[str], share: float, by: EvaluationText) -> Dropped:
    shown = " ".join(words)[:DETAIL_CHARACTERS]
    return Dropped(Reason.CONTAMINATED, f"{share:.0%} of {by.source}: {shown!r}")


# ---------------------------------------------------------------- minhash


PERMUTATIONS = 128
MISSED_MAX = 1e-3
"""The most pairs at the threshold that share no band."""


def signatures(sets: Sequence[Hashes], *, seed: int = 0) -> npt.NDArray[np.uint32]:
    """The signature of each set of hashes: (sets, PERMUTATIONS). No set may be empty."""
    random = np.random.default_rng(seed)
    factors, shifts = random.integers(0, 2**63, (2, PERMUTATIONS, 1), dtype=np.uint64)
    factors = factors * np.uint64(2) + np.uint64(1)
    result = np.empty((len(sets), PERMUTATIONS), np.uint32)
    for row, hashes in enumerate(sets):
        result[row] = ((factors * hashes + shifts) >> np.uint64(32)).min(axis=1)
    return result


def rows_per_band(threshold: float) -> int:
    """The most values in a band with which at most `MISSED_MAX` of the pairs at the threshold are missed."""
    fitting = [r for r in range(1, 17) if (1 - threshold**r) ** (PERMUTATIONS // r) <= MISSED_MAX]
    return max(fitting, default=1)


def similarity(a: Hashes, b: Hashes) -> float:
    """Jaccard's similarity of two sets, each sorted and not empty."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def near_earlier(
    sets: Sequence[Hashes], kinds: Sequence[Hashable], threshold: float
) -> dict[int, tuple[int, float]]:
    """Each set that is similar to an earlier one: the index of the most similar, and the similarity.

    A set that is here is no longer compared with: what is left has no two similar sets. Sets of different
    `kinds` are never similar.
    """
    rows = rows_per_band(threshold)
    marks = signatures(sets)
    buckets: dict[Hashable, list[int]] = defaultdict(list)
    near: dict[int, tuple[int, float]] = {}
    for index, (one, kind) in enumerate(zip(sets, kinds, strict=True)):
        keys = [
            (kind, start, marks[index, start : start + rows].tobytes())
            for start in range(0, PERMUTATIONS - rows + 1, rows)
        ]
        earlier = sorted({other for key in keys for other in buckets.get(key, ())})
        best = max(((similarity(one, sets[other]), -other) for other in earlier), default=(0.0, 0))
        if best[0] >= threshold:
            near[index] = -best[1], best[0]
            continue
        for key in keys:
            buckets[key].append(index)
    return near
