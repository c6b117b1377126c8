"""Exact match: a completion is the reference answer, as text, as a value of JSON, or in its words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any, Literal

from millrace.rewards.references import (
    AnswerIs,
    Extract,
    ReferenceAnswers,
    equals,
    identical,
    json_value,
    written,
)
from millrace.tasks.rows import Row

_FENCED = re.compile(r"```(?:json\w*)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)
_SIGNS = str.maketrans("“”«»–—−‐‑", '""""-----', "'‘’ʼ`´$€£¥")
_WITHIN = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|(?<=\b[^\W\d_])\.(?=[^\W\d_]\b)")
"""Of 1,000 and U.S."""
_BETWEEN = re.compile(r'[\s,;!?"()\[\]{}。、，；！？（）]+|(?<=[^\W\d_])[-/.](?=\w)|(?<=\w)[-/.](?=[^\W\d_])')
_FRONT = re.compile(r"^(?:[:*_]|[./-](?!\d))+")
ARTICLES = frozenset({"a", "an", "the"})


class ExactReward:
    """1 if the extracted answer equals the reference as text, without surrounding space; else 0.

    A reference that is a number, a truth value or a date is equal to each plain way to write it. `answer_is`
    says what a list is. A value of JSON may be in a fence, with nothing around it. `compare` says whether
    another text with the same words, or some of them, earns anything.
    """

    name, is_async = "exact match", False
    file: str | None = None

    def __init__(
        self,
        extract: str | None,
        extract_answer: str | None = None,
        answer_is: AnswerIs = "one",
        compare: Literal["text", "words", "f1"] = "text",
    ) -> None:
        self._extract = Extract(extract)
        self._references = ReferenceAnswers(self.name, extract_answer, answer_is)
        self._is_json, self._compare = answer_is == "json", {"words": same_words, "f1": f1}.get(compare)

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        references = self._references.values(answer)
        text = self._extract(completion)
        if text is None:
            return 0.0
        if self._is_json:
            fenced = _FENCED.fullmatch(text)
            return float(identical(json_value(fenced[1] if fenced else text), references[0]))
        if any(equals(text, one) for one in references):
            return 1.0
        return max(self._compare(text, written(one)) for one in references) if self._compare else 0.0


# ---------------------------------------------------------------- answers in words


def words_of(text: str) -> list[str]:
    """The words of a short answer in small letters: without articles, quotes, currencies, percent signs, and
    punctuation around words. Signs inside count: 1.5 is not 15, -40 not 40, C++ not C#. An answer that is an
    article keeps it.
    """
    text = unicodedata.normalize("NFC", text).translate(_SIGNS).casefold().replace("&", " and ")
    parts = _BETWEEN.split(_WITHIN.sub("", text))
    words = [word for part in parts if (word := _FRONT.sub("", part).rstrip(".:*_/%-"))]
    return [word for word in words if word not in ARTICLES] or words or text.split()


def same_words(one: str, other: str) -> float:
    """1 for the same words, else 0. "hip-hop" is "hip hop" and "hiphop", but "1 5" is not "15"."""
    return float(_joined(one) == _joined(other))


def f1(one: str, other: str) -> float:
    """F1 of the words of two texts, from 0 to 1 (SQuAD, arXiv:1606.05250)."""
    mine, theirs = words_of(one), words_of(other)
    return 2 * (Counter(mine) & Counter(theirs)).total() / max(len(mine) + len(theirs), 1)


def _joined(text: str) -> str:
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(words_of(text)))
