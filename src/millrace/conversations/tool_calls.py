"""Calls of tools: what a turn asks for, and calls as plain lines."""

from __future__ import annotations

from typing import Any

import msgspec

LINE_CHARACTERS_MAX = 10_000
CALL_ID = "call{:05}"
"""The id of a call in its result: nine letters and digits, because some templates want these."""


class ToolCall(msgspec.Struct, frozen=True):
    """`positional`: arguments without a name, in order."""

    name: str
    arguments: dict[str, Any]
    positional: tuple[Any, ...] = ()


class Malformed(msgspec.Struct, frozen=True):
    """What should be a call, and why it is none."""

    reason: str


Calls = tuple[ToolCall | Malformed, ...]


class TurnParts(msgspec.Struct, frozen=True):
    """`content` is the text without reasoning and calls."""

    reasoning: str
    content: str
    calls: Calls = ()


class TurnText(str):
    """The text of a turn without special tokens. `marked`: the text with them. `parts`: known from the ids,
    where no text in a content can be a call or an end of thinking."""

    marked: str
    parts: TurnParts | None

    def __new__(cls, text: str, marked: str = "", parts: TurnParts | None = None) -> TurnText:
        self = super().__new__(cls, text)
        self.marked, self.parts = marked or text, parts
        return self
