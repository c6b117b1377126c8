"""Texts as words, and runs of words as 64-bit hashes: near copies have similar sets of hashes."""

from __future__ import annotations

import html
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

_UNSPACED = (
    "\u3005-\u3007\u3031-\u3035\u3040-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\uac00-\ud7af"
    "\uf900-\ufaff\U00020000-\U000323af"  # Chinese, Japanese, Yi, Korean
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaa7f"
)  # and Thai, Lao, Burmese, Khmer, Tai, Balinese, Javanese
_OPTIONAL = re.compile("[\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed\u08d3-\u08ff]")
"""Vowel points of Hebrew and Arabic, which texts may leave out."""
_SIGNS = frozenset("*/%^\u2030\u066a\u00b0")  # beside the symbols of mathematics and of currencies
_MARKUP = frozenset("$|~")  # no figures, though Unicode has them among those symbols
_BULLET = re.compile(r"^[ \t]*(?:[*+\-\u2190-\u21ff>]+|\d{1,3}[.)])[ \t]+(?=[^\W\d])", re.MULTILINE)
_TAG = re.compile(
    r"</?(?:a|b|blockquote|br|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|span|strong|sub|sup|table|tbody|td|th|thead|tr|u|ul)"
    r"(?:\s[^<>]*)?/?>|(?<=\])\((?:https?:|mailto:|[/#])[^()\s]*\)"
)
"""Of HTML, and the address of a link of Markdown."""
_EMPHASIS = re.compile(r"(?<![\w)\]*])\*+(?=\S)|(?<=[^\s*])\*+(?![\w(\[*])")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, odd: each place in a run weighs differently

COMMON_ROWS = 20
FRAME_WORDS = 8
"""Around one other word, a frame of fewer words makes no texts that are similar by 0.8."""


def normalized(text: str) -> str:
    """The text without differences of case, width, composition and white space."""
    return " ".join(_folded(text).split())


def _folded(text: str) -> str:
    """Folding cases may take a letter and its accent apart."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def words_of(text: str) -> list[str]:
    """Words with their vowel signs, numbers and signs of arithmetic; a character each where a script has no
    spaces. Punctuation, bullets and markup of every script do not count, nor do the commas of thousands.
    Digits of every script are those of ASCII."""
    pattern, ignored = _pattern()
    shown = _TAG.sub(" ", html.unescape(_folded(text)))
    plain = _OPTIONAL.sub("", _BULLET.sub("", ignored.sub("", shown)))
    found = pattern.findall(_EMPHASIS.sub(" ", " ".join(plain.split())))
    return [_number(word) if word[-1].isdecimal() else word for word in found]


def _number(word: str) -> str:
    return "".join(
        str(unicodedata.decimal(one)) if one.isdecimal() else "-" if one == "-" else "."
        for one in word
        if one not in ",\u066c"
    )


@cache
def _pattern() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Words, numbers and signs; and what is nothing: joiners, direction marks, variants. Of the basic plane:
    a set with others is slow."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for one in map(chr, range(0x10000)):
        kinds[unicodedata.category(one)].append(one)
    variants = {one for one in kinds["Mn"] if "VARIATION SELECTOR" in unicodedata.name(one, "")}
    marks = "".join(one for kind in ("Mn", "Mc") for one in kinds[kind] if one not in variants)
    signs = re.escape("".join({*kinds["Sm"], *kinds["Sc"], *_SIGNS} - _MARKUP))
    pattern = (
        r"(?:(?<![^\s(\[{=,$*/^])-)?\d+(?:[.,\u066b\u066c]\d+)*"
        rf"|(?=[^\W\d_])[{_UNSPACED}][{marks}]*"
        rf"|[^\W\d_{_UNSPACED}]+(?:[{marks}]+[^\W\d_{_UNSPACED}]*)*"
        rf"|[{signs}]"
    )
    return re.compile(pattern), re.compile(f"[{''.join((*kinds['Cf'], *kinds['Me'], *variants))}]+")


def figures_of(words: Sequence[str]) -> tuple[str, ...]:
    """Numbers and signs of arithmetic, in order. Texts with other figures ask for another answer."""
    return tuple(word for word in words if not word[0].isalpha())


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
