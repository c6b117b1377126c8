"""Turns in harmony's format, as gpt-oss writes them.

A turn has several messages: a header with a channel, and for a call its recipient; a content; an end. The
template's history differs: it names the channel `final` behind the prompt's `<|start|>assistant`, drops
thinking, and wants the calls of a turn before their results. So these rules stand here.

Source: the package openai-harmony 0.0.8, and the bridge of renderers 0.1.12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millrace.conversations.grammars import CALL, CHANNEL, END, MESSAGE, RETURN, START, checked, is_harmony
from millrace.conversations.tool_calls import TurnParts, TurnText
from millrace.core.errors import ConfigError
from millrace.core.turns.stop_strings import before_stop
from millrace.episodes.bridge import Begin, Bridge, ChatBridge, TemplateBridge
from millrace.episodes.environment import Message

_HEADS = {
    "user": f"{START}user{MESSAGE}",
    "system": f"{START}developer{MESSAGE}# Instructions\n\n",
    "developer": f"{START}developer{MESSAGE}# Instructions\n\n",
}
_RESULT = f" to=assistant{CHANNEL}commentary{MESSAGE}"
_REPLY = f"{START}assistant"
_FUNCTIONS, _UNKNOWN = "functions.", "unknown"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME = re.compile(r"\s*([^\s<]+)")
_SLASH = "<\\/"
"""`</` in a text of JSON."""


class HarmonyMessage(NamedTuple):
    """One message of a turn. `recipient`: of a call; empty: it is none."""

    channel: str
    recipient: str
    content: str


def make_chat_bridge(
    tokenizer: Any,
    role: str,
    arguments: Mapping[str, Any],
    tools: Sequence[Any] = (),
    ends: Collection[int] = (),
) -> Bridge:
    """The bridge of chat prompts for a tokenizer; the arguments are those of `TemplateBridge`.

    Raises: ConfigError: turns cannot be appended to what the chat template writes."""
    if is_harmony(tokenizer):
        return HarmonyBridge(tokenizer, role, arguments, tools, ends)
    return ChatBridge(tokenizer, role, arguments, tools, ends)


def turn_reader(tokenizer: Any) -> Callable[..., str]:
    """What makes the text of a turn's ids, without special tokens, up to one of the strings `stop`."""
    if is_harmony(tokenizer):
        return HarmonyTurns(tokenizer).text
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    special = frozenset(tokenizer.all_special_ids)

    def text(ids: Sequence[int], stop: Sequence[str] = ()) -> TurnText:
        ids = list(ids)
        plain = before_stop(decode(ids, skip_special_tokens=True), stop)[0]
        while ids and ids[-1] in special:  # what ends a turn marks no call
            ids.pop()
        return TurnText(plain, before_stop(decode(ids, skip_special_tokens=False), stop)[0])

    return text


class HarmonyBridge(TemplateBridge):
    """The end of a message that was cut off, messages with the observation, and the begin of the next turn.

    A content is encoded without special tokens, and so is the name of a tool. The result of a tool is plain
    text, as openai-harmony writes it; templates quote it as JSON. A result without a name is of the function
    that the turn has called in its place.

    Raises: ConfigError: the template begins a turn in another way.
    """

    def _prepare(self) -> None:
        self._turns = HarmonyTurns(self._tokenizer)
        begin: list[Message] = [{"role": "user", "content": "begin"}]
        seen, prompt = self._render(begin, False), self._render(begin, True)
        if prompt != seen + _REPLY:
            raise ConfigError(
                f"the chat template has harmony's tokens, and its prompt does not end with {_REPLY}: turns "
                "cannot be appended exactly\n  Use the model's own template, or `task.chat = false`."
            )
        self._prompt = self._encoding.template(prompt.removeprefix(seen))
        self._closed = self._ends | self._turns.ends
        self.after([], "")

    def after(self, turn: Sequence[int], observation: str | list[Message], before: Begin = ()) -> list[int]:
        """Raises: ConfigError: harmony has no message of this role here."""
        ids = [] if self._closed.intersection(turn[-1:]) else self._encoding.template(END)
        called = [one.recipient for one in self._turns.messages(turn) if one.recipient]
        for one in self._messages(observation):
            if one["role"] == "tool":
                recipient = called.pop(0) if called else _FUNCTIONS + _UNKNOWN
                name = _FUNCTIONS + one["name"].removeprefix(_FUNCTIONS) if one.get("name") else recipient
                ids += self._text.framed_ids([START, _RESULT, END], [name, one["content"]])
            elif one["role"] in _HEADS:
                ids += self._text.framed_ids([_HEADS[one["role"]], END], [one["content"]])
            else:
                raise ConfigError(
                    f"harmony appends no message of role {one['role']!r}: "
                    f"use {', '.join([*_HEADS, 'tool'])} (`reward.role`)"
                )
        return [*ids, *self._prompt]


class HarmonyTurns:
    """Reads the ids of turns. Text that looks like a special token is text."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        added = tokenizer.added_tokens_encoder
        self._start, self._channel, self._message = added[START], added[CHANNEL], added[MESSAGE]
        self.ends = frozenset({added[END], added[CALL], added[RETURN]})

    def messages(self, turn: Sequence[int]) -> list[HarmonyMessage]:
        """The messages of a turn, the last one maybe cut off. A header that was cut off is none."""
        header: list[int] = []
        content: list[int] | None = None
        messages = list[HarmonyMessage]()
        for one in turn:
            if one == self._start or one in self.ends:
                if content is not None:
                    messages += self._read(header, content)
                header, content = [one] if one == self._start else [], None
            elif content is None and one == self._message:
                content = []
            else:
                (header if content is None else content).append(one)
        return messages + self._read(header, content) if content is not None else messages

    def text(self, turn: Sequence[int], stop: Sequence[str] = ()) -> str:
        """A turn as other families write it: `<think>`, the analysis, `</think>`, the other contents, and
        each call as `<tool_call>` with JSON. A turn without a message is its plain text. `stop`: strings, of
        which one may have ended the last content."""
        messages = self.messages(turn)
        if not messages:
            return before_stop(str(self._decode(list(turn), skip_special_tokens=True)), stop)[0]
        last = messages[-1]
        messages[-1] = last._replace(content=before_stop(last.content, stop)[0])
        contents = [one for one in messages if not one.recipient]
        thinking = "\n".join(one.content for one in contents if one.channel == "analysis")
        others = [one.content for one in contents if one.channel != "analysis"]
        calls = [(one.recipient.removeprefix(_FUNCTIONS), one.content) for one in messages if one.recipient]
        text = "\n".join([*others, *(_call(*one) for one in calls)])
        if len(others) < len(contents):
            text = f"<think>\n{thinking}\n</think>\n\n{text}"
        parts = TurnParts(thinking.strip(), "\n".join(others), tuple(checked(*one) for one in calls))
        return TurnText(text, parts=parts)

    def _read(self, header: list[int], content: list[int]) -> list[HarmonyMessage]:
        """None, if the model speaks for another: for a user, or for a tool with a result."""
        at = header.index(self._channel) if self._channel in header else len(header)
        parts = header[:at], header[at + 1 :]
        role, named = (self._decode(ids, skip_special_tokens=False) for ids in parts)
        if header[:1] == [self._start] and not role.startswith(_REPLY):
            return []
        channel, recipient = _NAME.match(named), _RECIPIENT.search(f"{role} {named}")
        return [
            HarmonyMessage(
                channel[1] if channel else "",
                recipient[1] if recipient else "",
                self._decode(content, skip_special_tokens=True),
            )
        ]


def _call(name: str, arguments: str) -> str:
    """A call in a text for people and rewards."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>{json.dumps(call).replace('</', _SLASH)}</tool_call>"
