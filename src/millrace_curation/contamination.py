"""Rows that repeat a text of an evaluation: training on them would make the evaluation worthless.

A row is contaminated if at least `COVERED` of the words of an evaluation's text are in the row, in runs of
`length` words or more. A shorter text must be in the row whole, and a text of fewer than `SHORTEST` words
must be the row. Runs of words that are in very many rows are frames, and do not count.

Source:
    Tulu 3, arXiv:2411.15124, section 3.2 (8 words, half of the text); GPT-3, arXiv:2005.14165, appendix C
    (13 words).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace_curation.candidate import CandidateRow, Dropped, Reason
from millrace_curation.words import COMMON_ROWS, runs_of, words_of

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
