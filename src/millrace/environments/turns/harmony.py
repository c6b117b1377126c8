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

from millrace.core.errors import ConfigError
from millrace.environments.tokenizer import encode
from millrace.environments.turns.bridge import Bridge, ChatBridge, TemplateBridge
from millrace.environments.turns.environment import Message

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
_MARKUP = START, CHANNEL, MESSAGE, END, CALL, RETURN
_HEADS = {
    "user": f"{START}user{MESSAGE}",
    "system": f"{START}developer{MESSAGE}# Instructions\n\n",
    "developer": f"{START}developer{MESSAGE}# Instructions\n\n",
}
_RESULT = f" to=assistant{CHANNEL}commentary{MESSAGE}"
_REPLY = f"{START}assistant"
_FUNCTIONS, _UNKNOWN = "functions.", "unknown"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*([^\s<]+)")
_SLASH = "<\\/"
"""`</` in a text of JSON."""


class HarmonyMessage(NamedTuple):
    """One message of a turn. `recipient`: of a call; empty: it is none."""

    channel: str
    recipient: str
    content: str


def is_harmony(tokenizer: Any) -> bool:
    """Whether the chat template and the tokens are harmony's."""
    added = getattr(tokenizer, "added_tokens_encoder", {})
    return CHANNEL in str(getattr(tokenizer, "chat_template", None)) and all(one in added for one in _MARKUP)


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


def turn_reader(tokenizer: Any) -> Callable[[list[int]], str]:
    """What makes the text of a turn's ids, without special tokens."""
    if is_harmony(tokenizer):
        return HarmonyTurns(tokenizer).text
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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
        if not prompt.startswith(seen + _REPLY):
            raise ConfigError(
                f"the chat template has harmony's tokens, and no {_REPLY} at its end: turns cannot be "
                "appended exactly\n  Use the model's own template, or `task.chat = false`."
            )
        self._prompt = self._encoding.template(prompt.removeprefix(seen))
        self._closed = self._ends | self._turns.ends
        self.after([], "")

    def after(self, turn: Sequence[int], observation: str | list[Message]) -> list[int]:
        """Raises: ConfigError: harmony has no message of this role here."""
        template, plain = self._encoding.template, self._encoding.plain
        ids = [] if self._closed.intersection(turn[-1:]) else template(END)
        called = [one.recipient for one in self._turns.messages(turn) if one.recipient]
        for one in self._messages(observation):
            if one["role"] == "tool":
                recipient = called.pop(0) if called else _FUNCTIONS + _UNKNOWN
                name = _FUNCTIONS + one["name"].removeprefix(_FUNCTIONS) if one.get("name") else recipient
                ids += template(START) + plain(name) + template(_RESULT)
            elif one["role"] in _HEADS:
                ids += template(_HEADS[one["role"]])
            else:
                raise ConfigError(
                    f"harmony appends no message of role {one['role']!r}: "
                    f"use {', '.join([*_HEADS, 'tool'])} (`reward.role`)"
                )
            ids += plain(one["content"]) + template(END)
        return [*ids, *self._prompt]


class HarmonyTurns:
    """Reads the ids of turns. Text that looks like a special token is text."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        added = tokenizer.added_tokens_encoder
        self._start, self._channel, self._message = added[START], added[CHANNEL], added[MESSAGE]
        self._thinks = [self._channel, *encode(tokenizer, "analysis")]
        self.ends = frozenset({added[END], added[CALL], added[RETURN]})

    def messages(self, turn: Sequence[int]) -> list[HarmonyMessage]:
        """The messages of a turn, the last one maybe cut off. A header that was cut off is none. If the turn
        begins with a content, the prompt has begun its thinking."""
        marks = self.ends | {self._channel, self._message}
        opened = next((one for one in turn if one in marks), None) in self.ends and self._message in turn
        header: list[int] = self._thinks if opened else []
        content: list[int] | None = [] if opened else None
        messages = []
        for one in turn:
            if one == self._start or one in self.ends:
                if content is not None:
                    messages.append(self._read(header, content))
                header, content = [], None
            elif content is None and one == self._message:
                content = []
            else:
                (header if content is None else content).append(one)
        return [*messages, self._read(header, content)] if content is not None else messages

    def text(self, turn: Sequence[int]) -> str:
        """A turn as other families write it: `<think>`, the analysis, `</think>`, the other contents, and
        each call as `<tool_call>` with JSON. A turn without a message is its plain text."""
        messages = self.messages(turn)
        if not messages:
            return str(self._decode(list(turn), skip_special_tokens=True))
        contents = [one for one in messages if not one.recipient]
        thinking = "\n".join(one.content for one in contents if one.channel == "analysis")
        others = [one.content for one in contents if one.channel != "analysis"]
        text = "\n".join([*others, *(_call(one) for one in messages if one.recipient)])
        return f"<think>\n{thinking}\n</think>\n\n{text}" if len(others) < len(contents) else text

    def _read(self, header: list[int], content: list[int]) -> HarmonyMessage:
        text = self._decode(header, skip_special_tokens=False)
        channel, recipient = _NAME.search(text), _RECIPIENT.search(text)
        return HarmonyMessage(
            channel[1] if channel else "",
            recipient[1] if recipient else "",
            self._decode(content, skip_special_tokens=True),
        )


def _call(one: HarmonyMessage) -> str:
    """A call as `find_calls` reads it. Arguments that are no JSON stay a text, which is malformed there. No
    text in them ends the call."""
    call = {"name": one.recipient.removeprefix(_FUNCTIONS), "arguments": one.content}
    return f"<tool_call>{json.dumps(call).replace('</', _SLASH)}</tool_call>"
