"""How a call is written behind its opening mark: as one JSON object, as a name and JSON, with a tag around
each argument, as Python, or with braces.

A grammar reads the calls that begin at a place of a text. It parses each value from its begin, so a mark
inside of an argument ends nothing.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from millrace.conversations.tool_calls import Malformed, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of the arguments of each tool on offer, by name."""
NAME = r"[\w.\-]+?"
PYTHON_CHARACTERS_MAX = 100_000
_BETWEEN = re.compile(r"[\s,;]*")
_DECODER = json.JSONDecoder()
_ENDED = re.compile(r"\s*(?:[\],;]|$)")
_TEXT = re.compile(r"""\\.|(\"{3}|'{3}).*?\1|(?P<line>(["'])(?:\\.|(?!\3).)*\3)""", re.DOTALL)
_BREAK = re.compile(r"(?<!\\)[\r\n]")
_CONSTANTS = {"true": True, "false": False, "null": None}


class Read(NamedTuple):
    """The calls from one place on, and where the text goes on behind them."""

    calls: list[ToolCall | Malformed]
    stop: int


class Grammar(Protocol):
    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        """None: no call stands there."""


def literal(text: str) -> str:
    """A pattern for what a template writes between names and values: models vary the space, also between
    marks."""
    words = re.sub(r"(?<=\S)(?=[<\[])", " ", text).split()
    edge = (r"\s*" if text[:1].isspace() else "", r"\s*" if text[-1:].isspace() else "")
    return edge[0] + r"\s*".join(map(re.escape, words)) + (edge[1] if words else "")


class JsonCalls(NamedTuple):
    """`{"name": ..., "arguments": {...}}`, alone, several, or in a list. Each path leads through tables.
    Without paths a call is `{NAME: {...}}`."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        calls = list[ToolCall | Malformed]()
        while True:
            begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if calls and text[begin : begin + 1] not in ("{", "["):
                return Read(calls, at)
            try:
                value, at = _DECODER.raw_decode(text, begin)
            except (ValueError, RecursionError) as error:
                return Read([*calls, Malformed(f"the call is no JSON: {error}")], begin)
            calls += [self.call(one) for one in (value if isinstance(value, list) and value else [value])]

    def call(self, value: Any) -> ToolCall | Malformed:
        if not self.name:
            keyed = list(value.items()) if isinstance(value, dict) else []
            return checked(*keyed[0]) if len(keyed) == 1 else Malformed("a call is {NAME: {...}}")
        name = _at(value, self.name)
        if not isinstance(name, str):
            value = value.get("function") if isinstance(value, dict) else None
            name = _at(value, self.name[-1:])
        if not isinstance(name, str):
            shape = f'{{"{self.name[-1]}": ..., "{self.arguments[-1]}": {{...}}}}'
            return Malformed(f"a call is {shape}")
        found = (_at(value, path) for path in self._paths())
        return checked(name, next((one for one in found if one is not None), {}))

    def is_call(self, value: Any, tools: Schemas) -> bool:
        """Whether JSON without a mark is a call: it has the keys of one, and the name of a tool on offer."""
        keys = {*self.name, *(key for path in self._paths() for key in path), "function", "type", "id"}
        inner = value.get("function", value) if isinstance(value, dict) else None
        return (
            isinstance(inner, dict)
            and keys.issuperset({*value, *inner})
            and inner.get(self.name[-1]) in tools
        )

    def has_arguments(self, value: Any) -> bool:
        return any(
            isinstance(_at(one, path), dict | str)
            for one in (value, value.get("function"))
            for path in self._paths()
        )

    def _paths(self) -> list[tuple[str, ...]]:
        """Models know the other word too."""
        return [self.arguments, (*self.arguments[:-1], "arguments"), (*self.arguments[:-1], "parameters"),
                self.arguments[-1:]]  # fmt: skip


class BareJsonCalls(NamedTuple):
    """JSON calls without a mark: nothing but calls may stand behind them, else they are an answer."""

    inner: JsonCalls = JsonCalls()

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        values = list[Any]()
        while (at := _BETWEEN.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            values += value if isinstance(value, list) else [value]
        if at < len(text) or not all(self.inner.is_call(one, tools) for one in values):
            return self._cut_off(text, at, tools) if not values else None
        if not any(map(self.inner.has_arguments, values)):
            return None
        return Read([self.inner.call(one) for one in values], at)

    def _cut_off(self, text: str, at: int, tools: Schemas) -> Read | None:
        """JSON that does not end, or is damaged, and begins as a call of a tool on offer does."""
        begins = re.compile(
            r'\[?\s*\{\s*"' + re.escape(self.inner.name[-1]) + r'"\s*:\s*"([^"]*)"\s*,\s*"(\w+)"\s*:'
        )
        found = begins.match(text, at)
        if (
            found is None
            or found[1] not in tools
            or (found[2],) not in [path[-1:] for path in self.inner._paths()]
        ):
            return None
        try:
            json.loads(text[at:])
        except (ValueError, RecursionError) as error:
            return Read([Malformed(f"the call is no JSON: {error}")], len(text))
        return None


class NamedCalls(NamedTuple):
    """A name, and its arguments as JSON: `name\\n{...}`. `between`: a pattern."""

    between: str
    bare: bool = False

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        found = re.compile(rf"\s*({NAME})(?:{self.between})\s*(?=\{{)").match(text, at)
        if found is None or (self.bare and found[1] not in tools):
            return None if self.bare else Read([Malformed("a call is a name, and its arguments as JSON")], at)
        try:
            value, stop = _DECODER.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            return Read([Malformed(f"the arguments of {found[1]} are no JSON: {error}")], found.end())
        return Read([checked(found[1], value)], stop)


class TaggedCalls(NamedTuple):
    """A name, and each argument with its key between marks. The marks are patterns. `end`: behind the last
    argument. The group `text` of `before_value` is the mark of a text. `on_lines`: a value stands on lines of
    its own."""

    behind_name: str
    before_key: str
    before_value: str
    behind_value: str
    end: str
    on_lines: bool

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        name = re.compile(
            rf"\s*({NAME})(?:{self.behind_name})\s*(?={self.before_key}|{self.end or '$'}|$)"
        ).match(text, at)
        if name is None:
            return Read([Malformed("a call has the name of a tool, and then its arguments")], at)
        schema = tools.get(name[1], {}).get("properties") or {}
        begins = rf"(?:{self.before_key})\s*(?P<key>[^<>\n]+?)(?:{self.before_value})"
        one = re.compile(
            rf"\s*{begins}(?P<value>.*?)(?:{self.behind_value})"
            rf"(?=\s*(?:{self.before_key}|{self.end or '$'}))",
            re.DOTALL,
        )
        arguments, at, texts = dict[str, Any](), name.end(), ""
        while found := one.match(text, at):
            key, value = found["key"].strip(), found["value"]
            if self.on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            is_text = found.groupdict().get("text") and not _is_typed(schema.get(key))
            arguments[key] = value if is_text else of_schema(value, schema.get(key))
            at, texts = found.end(), texts + value
        inside = {inner["key"].strip() for inner in re.finditer(begins, texts)}
        closed = re.compile(rf"\s*(?:{self.end})").match(text, at)
        if closed is None or inside & schema.keys() - arguments.keys():
            return Read([Malformed(f"the call of {name[1]}, or an argument of it, does not end")], at)
        return Read([ToolCall(name[1], arguments)], at)


class PythonCalls(NamedTuple):
    """`name(key="value")`, one a line or several in a list."""

    bare: bool = False

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        calls = list[ToolCall | Malformed]()
        begin = re.compile(r"[\s,;]*\[?\s*([A-Za-z_][\w.\-]*)\(")
        while found := begin.match(text, at):
            if self.bare and found[1] not in tools:
                break
            stop = end_of_brackets(text, found.end() - 1)
            call = python_call(found[1], text[found.end() - 1 : stop])
            if self.bare and isinstance(call, Malformed) and not _ENDED.match(text, stop):
                break  # a function in a text
            calls.append(_of_types(call, tools) if isinstance(call, ToolCall) else call)
            at = stop
        if not calls:
            return None if self.bare else Read([Malformed('a call is name(key="text")')], at)
        closed = re.compile(r"\s*\]").match(text, at)
        return Read(calls, closed.end() if closed else at)


class BracedCalls(NamedTuple):
    """`name{key:value}`, with the mark `quote` around each text, as Gemma writes it."""

    quote: str

    def read(self, text: str, at: int, tools: Schemas) -> Read | None:
        found = re.compile(rf"\s*({NAME})\s*(?=\{{)").match(text, at)
        if found is None:
            return Read([Malformed("a call is a name, and its arguments in braces")], at)
        try:
            value, stop = self._value(text, found.end())
        except (ValueError, RecursionError, IndexError) as error:
            return Read([Malformed(f"the arguments of {found[1]} cannot be read: {error}")], found.end())
        call = checked(found[1], value)
        return Read([_of_types(call, tools) if isinstance(call, ToolCall) else call], stop)

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """Raises: ValueError, IndexError: no value stands there."""
        at += len(text[at:]) - len(text[at:].lstrip()) if text[at : at + 1].isspace() else 0
        if text.startswith(self.quote, at):
            stop = text.index(self.quote, at + len(self.quote))
            return text[at + len(self.quote) : stop], stop + len(self.quote)
        if text[at] in "{[":
            return self._several(text, at + 1, text[at] == "{")
        found = re.compile(r"[^,{}\[\]]*").match(text, at)
        assert found is not None
        word = found[0].strip()
        try:
            return json.loads(word), found.end()
        except ValueError:
            return (None if word == "None" else word), found.end()

    def _several(self, text: str, at: int, keyed: bool) -> tuple[Any, int]:
        table, values = dict[str, Any](), list[Any]()
        while text[at] not in "}]":
            if keyed:
                quoted = text.startswith(self.quote, at)
                begin = at + len(self.quote) * quoted
                stop = text.index(self.quote if quoted else ":", begin)
                key, at = text[begin:stop].strip(), text.index(":", stop) + 1
                table[key], at = self._value(text, at)
            else:
                value, at = self._value(text, at)
                values.append(value)
            at += text[at] == ","
            at += len(text[at:]) - len(text[at:].lstrip())
        return (table if keyed else values), at + 1


def checked(name: str, arguments: Any) -> ToolCall | Malformed:
    """Some models write the JSON of the arguments as a text."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return Malformed(f"the arguments of {name} are no object")
    return ToolCall(name, arguments)


def of_schema(text: str, schema: Any) -> Any:
    """The value of an argument that stands between tags: a text as it is, where the schema takes a text."""
    types = _types(schema)
    is_text = any(kind.startswith("str") for kind in types)  # some data sets write `str, optional`
    if is_text and not (text.strip() in ("null", "None") and "null" in types):
        return text
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(text.strip())
    return text


def _types(schema: Any) -> set[str]:
    schema = schema if isinstance(schema, Mapping) else {}
    options = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return {str(kind) for one in options if isinstance(one, Mapping) for kind in _as_list(one.get("type"))}


def _is_typed(schema: Any) -> bool:
    return bool(_types(schema) - {"any", "None"})


def python_call(name: str, arguments: str) -> ToolCall | Malformed:
    """`arguments`: with their parentheses. Models break lines in texts, which Python does not take."""
    try:
        if len(arguments) > PYTHON_CHARACTERS_MAX:
            raise ValueError(f"more than {PYTHON_CHARACTERS_MAX:,} characters")
        arguments = _TEXT.sub(_on_one_line, arguments)
        call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or None in [one.arg for one in call.keywords]:
            raise ValueError("no call")
        call = _WithConstants().visit(call)
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return ToolCall(name, values, tuple(map(ast.literal_eval, call.args)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return Malformed(f'a call is one line such as {name}(1, name="text")')


def _on_one_line(text: re.Match[str]) -> str:
    return _BREAK.sub(lambda found: repr(found[0])[1:-1], text[0]) if text["line"] else text[0]


def _of_types(call: ToolCall, tools: Schemas) -> ToolCall:
    """Some templates write each value as a text, so models do. Where any type will do, a text is a text."""
    schema = tools.get(call.name, {}).get("properties") or {}
    arguments = {
        key: of_schema(value, schema[key]) if isinstance(value, str) and _is_typed(schema.get(key)) else value
        for key, value in call.arguments.items()
    }
    return ToolCall(call.name, arguments, call.positional)


class _WithConstants(ast.NodeTransformer):
    """Models write the words of JSON in Python too."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def end_of_brackets(text: str, at: int) -> int:
    """Where the bracket at a place is closed; the end of the text, if it is not."""
    depth, quote = 0, ""
    piece = re.compile(r"""\\.|'''|\"\"\"|["'()\[\]{}]""", re.DOTALL)
    for found in piece.finditer(text, at):
        one = found[0]
        if quote:
            quote = "" if one == quote else quote
        elif one in ("'", '"', "'''", '"""'):
            quote = one
        elif one in "([{":
            depth += 1
        elif one in ")]}":
            depth -= 1
            if depth == 0:
                return found.end()
    return len(text)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
"""The tokens of harmony, in which gpt-oss writes."""
_MARKUP = START, CHANNEL, MESSAGE, END, CALL, RETURN


def is_harmony(tokenizer: Any) -> bool:
    """Whether the chat template and the tokens are harmony's."""
    added = getattr(tokenizer, "added_tokens_encoder", {})
    return CHANNEL in str(getattr(tokenizer, "chat_template", None)) and all(one in added for one in _MARKUP)
