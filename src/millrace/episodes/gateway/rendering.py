"""A conversation as token ids, and the messages after a reply as the ids that follow the reply's.

Ids decide: the next prompt is the earlier ids and what a bridge appends. Only a conversation that does not
begin like an earlier one is rendered as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from millrace.conversations.call_forms import NO_STYLE, CallStyle, style_of
from millrace.conversations.conversation_text import ConversationText
from millrace.conversations.encoding import Encoding, encodable
from millrace.conversations.tokenizer import encode_prompt
from millrace.conversations.tool_calls import CALL_ID
from millrace.core.errors import ConfigError, DataError
from millrace.episodes.bridge import Bridge
from millrace.episodes.gateway.calls import ChatTurn, RefusedCall
from millrace.episodes.harmony import make_chat_bridge

BRIDGES_MAX = 64
"""Sets of tools whose bridges are kept."""

NINE = len(CALL_ID.format(0))
Tools = Sequence[dict[str, Any]]


class Rendering:
    """With a chat template. Control tokens in texts of messages are encoded as text, so none ends a message.

    Args:
        arguments: of the chat template.
        ends: ids that end a turn of this model.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], ends: Collection[int] = ()) -> None:
        self._tokenizer, self._arguments, self._ends = tokenizer, dict(arguments), ends
        self._text = ConversationText(tokenizer, arguments)
        self._bridges: dict[bytes, Bridge] = {}
        self.style = style_of(tokenizer, self._arguments, refuses=False)
        self.shows_tools = self.style.shows_tools

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that is no conversation."""
        return encode_prompt(self._tokenizer, encodable(text))

    def whole(self, messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        """The ids of a conversation, up to where the assistant is to write.

        Raises: RefusedCall: the template cannot render the conversation.
        """
        tools = tools if self.shows_tools else ()
        try:
            style = style_of(self._tokenizer, self._arguments, refuses=bool(tools))
            return self._ids(messages, tools, style)
        except (ConfigError, DataError) as error:
            raise RefusedCall(str(error), field="messages") from error

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template takes the role `developer`. Another template gets `system` in its place."""
        probe = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
        try:
            self._text.checked(probe)
        except DataError:
            return False
        return True

    def _taken(self, messages: Sequence[ChatTurn]) -> list[ChatTurn]:
        return [
            replace(one, role="system") if one.role == "developer" and not self._knows_developer else one
            for one in messages
        ]

    def _ids(self, messages: Sequence[ChatTurn], tools: Tools, style: CallStyle) -> list[int]:
        """Some templates take ids of calls with nine letters and digits alone."""
        messages = self._taken(messages)
        try:
            return self._text.ids([_message(one, style) for one in messages], tools)
        except DataError as error:
            ids = dict.fromkeys(call.id for one in messages for call in one.calls)
            ids |= dict.fromkeys(one.call_id for one in messages if one.call_id)
            if not ids or all(len(one) == NINE for one in ids):
                raise
            numbered = {one: CALL_ID.format(n) for n, one in enumerate(ids, 1)}
            try:
                return self._text.ids([_message(one, style, numbered) for one in messages], tools)
            except DataError:
                raise error from None

    def after(
        self, ids: Sequence[int], messages: Sequence[ChatTurn], tools: Tools, begin: Sequence[ChatTurn] = ()
    ) -> list[int]:
        """The ids between the ids of a reply and the next reply. `begin`: of the conversation. Its messages
        before the first reply may have switches.

        Raises: ConfigError: the template rewrites what precedes the messages.
        """
        before = [
            {"role": one.role, "content": one.content}
            for one in takewhile(_is_before_replies, self._taken(begin))
        ]
        later = [{"role": one.role, "content": one.content} for one in self._taken(messages)]
        return self._bridge(tools if self.shows_tools else ()).after(ids, later, before)

    def _bridge(self, tools: Tools) -> Bridge:
        key = json.dumps(list(tools), sort_keys=True).encode()
        bridge = self._bridges.get(key)  # another thread may clear the table
        if bridge is None:
            bridge = make_chat_bridge(self._tokenizer, "user", self._arguments, tools, self._ends)
            if len(self._bridges) >= BRIDGES_MAX:
                self._bridges.clear()
            self._bridges[key] = bridge
        return bridge


class PlainRendering:
    """Without a chat template: each message is its text and a line break. Nothing shows the tools."""

    shows_tools, style = False, NO_STYLE

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._encoding = tokenizer, Encoding(tokenizer)

    def prompt(self, text: str) -> list[int]:
        return encode_prompt(self._tokenizer, encodable(text))

    def whole(self, messages: Sequence[ChatTurn], tools: Tools) -> list[int]:
        return [*encode_prompt(self._tokenizer, ""), *self._encoding.plain(_lines(messages))]

    def after(
        self, ids: Sequence[int], messages: Sequence[ChatTurn], tools: Tools, begin: Sequence[ChatTurn] = ()
    ) -> list[int]:
        return self._encoding.plain(_lines(messages))


def make_rendering(
    tokenizer: Any, arguments: Mapping[str, Any], ends: Collection[int] = ()
) -> Rendering | PlainRendering:
    if getattr(tokenizer, "chat_template", None):
        return Rendering(tokenizer, arguments, ends)
    return PlainRendering(tokenizer)


def _is_before_replies(one: ChatTurn) -> bool:
    return one.role in ("system", "developer", "user")


def _lines(messages: Sequence[ChatTurn]) -> str:
    return encodable("".join(f"{one.content}\n" for one in messages))


def _table(arguments: str) -> Any:
    """Arguments as a table: templates write tables as JSON, and would quote a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _message(one: ChatTurn, style: CallStyle, ids: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A message as templates take one. `ids`: others in place of those of the calls."""
    ids = ids or {}
    message: dict[str, Any] = {"role": one.role, "content": one.content}
    if one.reasoning:
        message["reasoning_content"] = one.reasoning
    if one.name:
        message["name"] = one.name
    if one.call_id:
        message["tool_call_id"] = ids.get(one.call_id, one.call_id)
    if one.calls:
        message["tool_calls"] = [
            {
                "id": ids.get(call.id, call.id),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if style.as_text else _table(call.arguments),
                },
            }
            for call in one.calls
        ]
    return message
