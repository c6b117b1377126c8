"""The reference answers of a row: what data files hold, as texts that a completion can equal; and the answer
in a text, by a pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from numbers import Integral, Rational, Real
from typing import Any, Literal

import numpy as np

from millrace.core.errors import ConfigError, DataError

AnswerIs = Literal["one", "any", "json"]
SHOWN_CHARACTERS = 80
_IFEVAL = re.compile(r"'instruction_id': \[?'\w+:|'func_name': '\w+', 'N':")
"""Instructions for a completion, as the sets of allenai have them."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


class ReferenceAnswers:
    """Reads the answer of a row as `reward.answer_is` says, and the part that `reward.extract_answer` finds.

    Args:
        reward: the name of the reward, for messages.
    """

    def __init__(self, reward: str, pattern: str | None, answer_is: AnswerIs = "one") -> None:
        self._reward, self._pattern, self._is = reward, pattern, answer_is
        self._extract = Extract(pattern, "reward.extract_answer")

    def values(self, answer: Any) -> list[Any]:
        """The values of which a completion must have one: texts without surrounding space, numbers, truth
        values, dates; with `"json"` one value of JSON.

        Raises: DataError: there is none, or it is a value that no completion could equal.
        """
        answer = unwrapped(answer)
        if answer is None:
            raise DataError(
                f"{self._reward} needs a reference answer, the row has none: set `task.answer` to its column"
            )
        if _IFEVAL.search(str(answer).replace('"', "'")):
            shown = f"the answer has instructions (IFEval), which no text equals: {_shown(answer)}"
            raise DataError(f"{shown}. Write a reward function for such rows")
        if self._is == "json":
            return [json_value(answer)]
        if self._is == "any" and isinstance(answer, list):
            if not answer:
                raise DataError("the list of accepted answers is empty: give it one, or leave the row out")
            return [self._scalar(one) for one in answer]
        return [self._scalar(answer)]

    def texts(self, answer: Any) -> list[str]:
        """As `values`, each as text. Raises: DataError: as `values`."""
        return [written(value) for value in self.values(answer)]

    def _scalar(self, value: Any) -> Any:
        _refuse_composed(value, self._is)
        if self._pattern is None and not isinstance(value, str):
            _refuse_unwritable(value)
            return value
        expected = self._extract(written(value))
        if expected is None:
            raise DataError(
                f"the answer {written(value)[-SHOWN_CHARACTERS:]!r} has nothing that `reward.extract_answer` "
                f"({self._pattern!r}) finds"
            )
        if not expected:
            raise DataError("the reference answer is empty: no answer could be told from an empty text")
        return expected


def equals(text: str, value: Any) -> bool:
    """Whether a text is this value: the same text; a plain way to write the number, the truth value or the
    date."""
    if isinstance(value, bool):
        return text.casefold() == str(value).casefold()
    if isinstance(value, Real | Decimal):
        return _NUMBER.fullmatch(text) is not None and Decimal(text) == Decimal(written(value))
    if isinstance(value, datetime):
        return text in _ways(value)
    return text == written(value)


def written(value: Any) -> str:
    """The shortest plain way to write a value: 18 for 18.0, 0.1 for the nearest number of 32 bits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, float):
        return _of_float(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        return _ways(value)[0]
    return value.isoformat() if isinstance(value, date | time) else str(value)


def unwrapped(value: Any) -> Any:
    """Plain objects in place of those of numpy and pandas, and lists in place of other sequences and sets.
    None: a value that is missing (NaN, NaT)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float | Decimal | date) and value != value:
        return None
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes | bytearray):
        return [unwrapped(one) for one in value]
    return value


def json_value(value: Any) -> Any:
    """A value as JSON has it, for comparison: text of JSON is what it says; a key without a value is absent.

    Raises: DataError: JSON has no such value.
    """
    value = unwrapped(value)
    if isinstance(value, str):
        try:
            return normal(json.loads(value))
        except (ValueError, RecursionError):
            return value
    return normal(value)


def normal(value: Any) -> Any:
    """A value of JSON without the differences that do not count. Raises: DataError: as `json_value`."""
    value = unwrapped(value)
    match value:
        case Mapping():
            return {str(key): normal(one) for key, one in value.items() if unwrapped(one) is not None}
        case list():
            return [normal(one) for one in value]
        case bool() | str() | None:
            return value
        case datetime() | date() | time():
            return written(value)
        case Integral():
            return int(value)
        case float() | Decimal():
            _refuse_unwritable(value)
            return Decimal(written(value))
    raise DataError(f"the answer {_shown(value)} has a {type(value).__name__}, and JSON has no such value")


def to_json(value: Any) -> str:
    """JSON text of what `normal` returns."""
    return json.dumps(value, ensure_ascii=False, default=float)


def identical(one: Any, other: Any) -> bool:
    """Equality that tells true from 1, of what `normal` returns."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


def _refuse_composed(value: Any, answer_is: AnswerIs) -> None:
    """Raises: DataError: the value is a list or a table, which has no one way to be written."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value))
        raise DataError(
            f"the answer is a table with the keys {keys}: name one behind a dot in `task.answer`, or set "
            '`reward.answer_is` to "json" (exact only) where the table itself is the answer'
        )
    if isinstance(value, list) and answer_is == "any":
        raise DataError(f"the list of accepted answers has a list in it: {_shown(value)}")
    if isinstance(value, list):
        raise DataError(
            f'the answer is a list: {_shown(value)}. Set `reward.answer_is` to "any" where each of them is '
            'right, or to "json" (exact only) where the list itself is the answer'
        )


def _refuse_unwritable(value: Any) -> None:
    """Raises: DataError: no completion could equal the value."""
    if isinstance(value, float | Decimal) and not np.isfinite(float(value)):
        raise DataError(f"the answer {value!r} is no finite number")
    if isinstance(value, Rational) and not isinstance(value, Integral):
        raise DataError(f"the answer is a {type(value).__name__}: write it as text")
    if not isinstance(value, bool | Real | Decimal | date | time):
        raise DataError(
            f"the answer {_shown(value)} is a {type(value).__name__}, which no text equals: write it as text"
        )


def _of_float(value: float) -> str:
    """Parquet's numbers of 32 bits come with digits that nobody wrote."""
    ways = [repr(value)]
    if np.isfinite(value) and float(np.float32(value)) == value:
        ways.append(str(np.float32(value)))
    shortest = min(ways, key=len)
    return shortest[:-2] if shortest.endswith(".0") else shortest


def _ways(value: datetime) -> list[str]:
    """The ways to write a moment. A day that pandas read is a moment at midnight."""
    ways = [value.isoformat(" "), value.isoformat("T")]
    return [value.date().isoformat(), *ways] if value.time() == time() else ways


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


# ---------------------------------------------------------------- the answer in a text


class Extract:
    """The answer in a text: the one group of the last match of a pattern, or all of the text."""

    def __init__(self, pattern: str | None, key: str = "reward.extract") -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"`{key}` ({pattern!r}) is not a regular expression: {error}") from error
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError(f"`{key}` ({pattern!r}) has {self._pattern.groups} groups, it needs one")

    def __call__(self, text: str) -> str | None:
        """The extracted text without surrounding space; None if the pattern does not match."""
        if self._pattern is None:
            return text.strip()
        matches = self._pattern.findall(text)
        return matches[-1].strip() if matches else None
