"""Fields of a request, taken one by one. A field that nobody took is unheeded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from millrace.episodes.gateway.calls import RefusedCall, canonical, from_value

CONSTRAINTS = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "use_beam_search",
)
"""Fields of OpenAI and vLLM that change the distribution of tokens beyond what the run may decide."""
SHOWN_CHARACTERS = 60
CONSTRAINS = "constrains sampling: the turn would not come from the policy that is trained. Leave it out"


class Fields:
    """The fields of one object. A field that is null counts as not given.

    Args:
        where: the object's place in the request, empty for the request.
    """

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self.rest = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str) -> Any:
        return self.rest.pop(name, None)

    def text(self, name: str) -> str:
        """Empty if not given."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value or ""
        self._wrong(name, value, "text")

    def named(self, name: str) -> str:
        """A text that must be given."""
        return self.text(name) or self.refuse(name, "is missing: give a text")

    def integer(self, name: str, least: int) -> int | None:
        value = self.take(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            return value
        self._wrong(name, value, f"a whole number of at least {least}")

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._wrong(name, value, "true or false")

    def strings(self, name: str) -> list[str]:
        """One string, or a list of strings. None of them is empty."""
        value = self.take(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if isinstance(found, list) and all(isinstance(one, str) and one for one in found):
            return found
        self._wrong(name, value, "a text, or a list of texts without an empty one")

    def inner(self, name: str) -> Fields:
        """The fields of an object; none if not given."""
        return self._object(self.take(name) or {}, self.path(name))

    def objects(self, name: str) -> list[Fields]:
        """The objects of a list; none if not given."""
        value = self.take(name)
        if value is None or isinstance(value, list):
            return [self._object(one, f"{self.path(name)}[{n}]") for n, one in enumerate(value or ())]
        self._wrong(name, value, "a list of objects")

    def refuse(self, name: str, reason: str) -> NoReturn:
        path = self.path(name)
        raise RefusedCall(f"`{path}` {reason}", field=path)

    def refuse_given(self, names: Iterable[str], reason: str) -> None:
        """Fields that are empty, zero or false ask for nothing, and are not refused."""
        for name in names:
            if self.take(name):
                self.refuse(name, reason)

    def _wrong(self, name: str, value: Any, needed: str) -> NoReturn:
        self.refuse(name, f"is {shown(value)}: it must be {needed}")

    @staticmethod
    def _object(value: Any, where: str) -> Fields:
        if not isinstance(value, dict):
            raise RefusedCall(f"`{where}` is {shown(value)}: it must be an object", field=where)
        return Fields(value, where)


def decode(body: bytes) -> Fields:
    """Half of a pair of surrogates is U+FFFD: JSON may have one, as of a text that was cut.

    Raises: RefusedCall: the body is no JSON object.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            values = json.loads(from_value(json.loads(body)))
        except (ValueError, RecursionError):
            raise RefusedCall(f"the body is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise RefusedCall(f"the body is {shown(values)}: it must be a JSON object")
    return Fields(values)


def refuse_more_than_one(fields: Fields, *names: str) -> None:
    """Raises: RefusedCall: the request asks for several turns."""
    for name in names:
        if (fields.integer(name, 0) or 1) > 1:
            fields.refuse(name, "asks for more than one turn: ask again for the next")


def take_alternatives(fields: Fields, name: str) -> int | None:
    """How many of the likeliest tokens are asked for at each position: none or one.

    Only the log-prob of the sampled token is recorded. So the list of one has the sampled token, as the lists
    of vLLM have it too. A longer list would be too short without a word, so it is refused.
    """
    alternatives = fields.integer(name, 0)
    if (alternatives or 0) > 1:
        fields.refuse(name, "asks for other tokens' log-probs: only those of sampled tokens are kept. Give 1")
    return alternatives


def take_arguments(fields: Fields, name: str) -> str:
    """The arguments of a call, as text or as an object, in the spelling of `canonical`."""
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return canonical(value or "{}")
    try:
        return from_value(value)
    except (ValueError, RecursionError) as error:
        fields.refuse(name, f"cannot be written as JSON: {error}")


def shown(value: Any) -> str:
    """A value in a message: its beginning, or its kind if it is nested."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[:SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
