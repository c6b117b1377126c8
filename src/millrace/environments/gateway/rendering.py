"""A conversation as token ids, and the messages after a reply as the ids that follow the reply's.

Ids decide: the next prompt is the earlier ids and what a bridge appends. Only a conversation that does not
begin like an earlier one is rendered as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from millrace.environments.gateway.calls import ChatTurn, RefusedCall
from millrace.environments.scores import encodable
from millrace.environments.tokenizer import encode_prompt
from millrace.environments.turns.bridge import Bridge
from millrace.environments.turns.call_forms.learn import NO_STYLE, style_of
from millrace.environments.turns.encoding import Encoding
from millrace.environments.turns.harmony import make_chat_bridge

BRIDGES_MAX = 64
"""Sets of tools whose bridges are kept."""

_MARK = 'xText{}x"'
_MARKS = re.compile(r'xText(\d+)x(\\?)"')
"""A mark, and the escape of its quote where the template writes the text as JSON."""
Tools = Sequence[dict[str, Any]]


class Rendering:
    """With a chat template. Text of messages is encoded without special tokens, so no text ends a message.

    Args:
        arguments: of the chat template.
        ends: ids that end a turn of this model.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], ends: Collection[int] = ()) -> None:
        self._tokenizer, self._arguments, self._ends = tokenizer, dict(arguments), ends
        self._encoding = Encoding(tokenizer)
        self._bridges: dict[bytes, Bridge] = {}
        self.style = style_of(tokenizer, self._arguments)
        self.shows_tools = self.style.shows_tools

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that is no conversation."""
        return encode_prompt(self._tokenizer, encodable(text))

    def whole(self, messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        """The ids of a conversation, up to where the assistant is to write.

        Raises: RefusedCall: the template cannot render the conversation.
        """
        texts = list[str]()
        marked = [self._marked(one, texts) for one in messages]
        options = {**self._arguments, **({"tools": list(tools)} if tools and self.shows_tools else {})}
        try:
            rendered = self._tokenizer.apply_chat_template(
                marked, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template is a program
            raise RefusedCall(
                f"the chat template cannot render the messages: {type(error).__name__}: {error}",
                field="messages",
            ) from error
        ids = list[int]()
        at = 0
        for found in _MARKS.finditer(rendered):
            text = texts[int(found[1])]
            written = json.dumps(text, ensure_ascii=False)[1:-1] if found[2] else text
            ids += self._encoding.template(rendered[at : found.start()]) + self._encoding.plain(written)
            at = found.end()
        return ids + self._encoding.template(rendered[at:])

    def after(self, ids: Sequence[int], messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        """The ids between the ids of a reply and the next reply.

        Raises: ConfigError: the template rewrites what precedes the messages.
        """
        return self._bridge(tools if self.shows_tools else ()).after(
            ids, [{"role": one.role, "content": one.content} for one in messages]
        )

    def _bridge(self, tools: Tools) -> Bridge:
        key = json.dumps(list(tools), sort_keys=True).encode()
        bridge = self._bridges.get(key)  # another thread may clear the table
        if bridge is None:
            bridge = make_chat_bridge(self._tokenizer, "user", self._arguments, tools, self._ends)
            if len(self._bridges) >= BRIDGES_MAX:
                self._bridges.clear()
            self._bridges[key] = bridge
        return bridge

    def _marked(self, one: ChatTurn, texts: list[str]) -> dict[str, Any]:
        """A message as templates take one, with a mark in place of each text of the agent's."""

        def mark(text: str) -> str:
            texts.append(encodable(text))
            return _MARK.format(len(texts) - 1)

        message: dict[str, Any] = {"role": one.role, "content": mark(one.content) if one.content else ""}
        if one.reasoning:
            message["reasoning_content"] = mark(one.reasoning)
        if one.name:
            message["name"] = mark(one.name)
        if one.call_id:
            message["tool_call_id"] = one.call_id
        if one.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": mark(call.name), "arguments": _marked(_table(call.arguments), mark)},
                }
                for call in one.calls
            ]
        return message


class PlainRendering:
    """Without a chat template: each message is its text and a line break. Nothing shows the tools."""

    shows_tools, style = False, NO_STYLE

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._encoding = tokenizer, Encoding(tokenizer)

    def prompt(self, text: str) -> list[int]:
        return encode_prompt(self._tokenizer, encodable(text))

    def whole(self, messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        return [*encode_prompt(self._tokenizer, ""), *self._encoding.plain(_lines(messages))]

    def after(self, ids: Sequence[int], messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        return self._encoding.plain(_lines(messages))


def make_rendering(
    tokenizer: Any, arguments: Mapping[str, Any], ends: Collection[int] = ()
) -> Rendering | PlainRendering:
    if getattr(tokenizer, "chat_template", None):
        return Rendering(tokenizer, arguments, ends)
    return PlainRendering(tokenizer)


def _lines(messages: Sequence[ChatTurn]) -> str:
    return encodable("".join(f"{one.content}\n" for one in messages))


def _table(arguments: str) -> Any:
    """Arguments as a table: templates write tables as JSON, and would quote a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """Arguments with a mark in place of each text and each key."""
    if isinstance(value, dict):
        return {mark(key): _marked(inner, mark) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, mark) for inner in value]
    return mark(value) if isinstance(value, str) else value
