"""Calls of tools in the text of a turn."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import msgspec

LINE_CHARACTERS_MAX = 10_000
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LINE = re.compile(r"\s*([A-Za-z_]\w*)\((.*)")


class ToolCall(msgspec.Struct, frozen=True):
    """`positional`: arguments without a name, in order."""

    name: str
    arguments: dict[str, Any]
    positional: tuple[Any, ...] = ()


class Malformed(msgspec.Struct, frozen=True):
    """What should be a call, and why it is none."""

    reason: str


class ReadTurn(str):
    """A text whose parts are known from the ids: no text in a content is a call or an end of thinking."""

    reasoning: str
    content: str
    calls: tuple[ToolCall | Malformed, ...]

    def __new__(
        cls, text: str, reasoning: str, content: str, calls: tuple[ToolCall | Malformed, ...]
    ) -> ReadTurn:
        self = super().__new__(cls, text)
        self.reasoning, self.content, self.calls = reasoning, content, calls
        return self


def call_of(name: str, arguments: str) -> ToolCall | Malformed:
    """Arguments that are no JSON object are malformed."""
    return _from_object({"name": name, "arguments": arguments})


def find_calls(text: str, names: Collection[str], *, plain: bool) -> list[ToolCall | Malformed]:
    """The calls in a text, in order; thinking has none. `names`: of the tools.

    Forms: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of Hermes and Qwen; a text that is one
    such object, or a list of them, as Llama and Mistral write it (`parameters` is another name for
    `arguments`). If `plain`: a line `name(1, b="text")` with the name of a tool, or a text that is one such
    line.
    """
    if isinstance(text, ReadTurn) and (text.calls or not plain):
        return list(text.calls)
    text = text.rpartition("</think>")[2].strip()
    if tagged := _TAGGED.findall(text):
        return [_from_json(body) for body in tagged]
    if re.match(r'\[?\s*{\s*"(name|type|function|arguments|parameters)"', text):
        return _from_list(text)
    return list(_plain(text, names)) if plain else []


def _from_list(text: str) -> list[ToolCall | Malformed]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Malformed(f"the call is no JSON: {error}")]
    return [_from_object(one) for one in (found if isinstance(found, list) else [found])]


def _from_json(body: str) -> ToolCall | Malformed:
    try:
        return _from_object(json.loads(body))
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is no JSON: {error}")


def _from_object(found: Any) -> ToolCall | Malformed:
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Malformed('a call is {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return Malformed(f"the arguments of {found['name']} are no object")
    return ToolCall(found["name"], arguments)


def _plain(text: str, names: Collection[str]) -> Iterator[ToolCall | Malformed]:
    lines = text.splitlines()
    for line in lines:
        match = _LINE.match(line[:LINE_CHARACTERS_MAX])
        if match is None:
            continue
        call = _from_line(match[1], line)
        if match[1] in names or (len(lines) == 1 and isinstance(call, ToolCall)):
            yield call


def _from_line(name: str, line: str) -> ToolCall | Malformed:
    try:
        if len(line) > LINE_CHARACTERS_MAX:
            raise ValueError(f"more than {LINE_CHARACTERS_MAX:,} characters")
        call = ast.parse(line.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or None in [one.arg for one in call.keywords]:
            raise ValueError("no call")
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return ToolCall(name, values, tuple(map(ast.literal_eval, call.args)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return Malformed(f'a call is one line such as {name}(1, name="text")')
