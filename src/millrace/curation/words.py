"""Texts as words, and runs of words as 64-bit hashes: near copies have similar sets of hashes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{_CJK}]|[^\W\d_{_CJK}]+|[^\w\s]")
_PROSE = frozenset(".,;:!?\"'`´‘’“”„…()[]{}«»–—−-$&\\|~#@")  # punctuation and markup, no arithmetic
_MIX = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, odd: each place in a run weighs differently

COMMON_ROWS = 20
FRAME_WORDS = 8
"""Around one other word, a frame of fewer words makes no texts that are similar by 0.8."""


def normalized(text: str) -> str:
    """The text without differences of case, width and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words_of(text: str) -> list[str]:
    """Words, numbers and signs of arithmetic; a character each where a script has no spaces. Punctuation and
    the commas of thousands do not count."""
    found = _WORD.findall(normalized(text))
    return [word.replace(",", "") if word[0].isdigit() else word for word in found if word not in _PROSE]


def figures_of(words: Sequence[str]) -> tuple[str, ...]:
    """Numbers and signs of arithmetic, sorted. Texts with other figures ask for another answer."""
    return tuple(sorted(word for word in words if not word[0].isalpha()))


def runs_of(words: Sequence[str], length: int) -> Hashes:
    """A hash for each run of `length` words, in order; shape (len(words) - length + 1,).

    Degenerate:
        Fewer words -> one hash, of all of them. No words -> none.
    """
    length = min(length, len(words))
    hashes = np.fromiter((_word_hash(word) for word in words), np.uint64, len(words))
    runs = np.zeros(max(0, len(words) - length + 1) if length else 0, np.uint64)
    for place in range(length):
        runs = runs * _MIX + hashes[place : place + len(runs)]
    return runs ^ (runs >> np.uint64(31))


def without_frames(texts: Sequence[Sequence[str]], share: float) -> list[list[str]]:
    """The words of each text outside frames, such as "put the answer in a box at the end". Frames are runs of
    `FRAME_WORDS` words in more than this share of the texts, and in more than `COMMON_ROWS`. A text of frames
    alone stays."""
    runs = [runs_of(words, FRAME_WORDS) for words in texts]
    once = [np.zeros(0, np.uint64), *map(np.unique, runs)]
    hashes, counts = np.unique(np.concatenate(once), return_counts=True)
    common = set(hashes[counts > max(COMMON_ROWS, share * len(texts))].tolist())
    outside = []
    for words, one in zip(texts, runs, strict=True):
        starts = [start for start, run in enumerate(one.tolist()) if run in common]
        framed = {start + step for start in starts for step in range(FRAME_WORDS)}
        left = [word for place, word in enumerate(words) if place not in framed]
        outside.append(left or list(words))
    return outside


@lru_cache(1 << 18)
def _word_hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode(errors="replace"))
