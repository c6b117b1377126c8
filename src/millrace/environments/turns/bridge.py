"""From an observation to the tokens that follow the sampled ones.

The next prompt is the earlier ids, unchanged, and the ids that a bridge appends. Sampled ids are never
encoded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from millrace.core.errors import ConfigError, DataError
from millrace.environments.scores import encodable
from millrace.environments.tokenizer import encode_prompt
from millrace.environments.turns.conversation_text import ConversationText
from millrace.environments.turns.encoding import Encoding
from millrace.environments.turns.environment import Message

_REPLY, _CONTENT = "xReplyx", "xContent{}x"
_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
CALL_ID = "call{:05}"
"""The id of a call in its result: nine letters and digits, because some templates want these."""

FRAMES_MAX = 256
"""Kinds of observations whose frames are kept: roles and names, in order, behind one begin."""

Begin = str | Sequence[Message]


class Bridge(Protocol):
    def after(self, turn: Sequence[int], observation: str | list[Message], before: Begin = ()) -> list[int]:
        """The ids between the ids of a turn and the next turn. `before`: the messages that the conversation
        began with, which may have switches that a template reads.

        Raises: ConfigError: the template cannot append the observation to such a begin."""

    def whole(self, observation: str | list[Message]) -> list[int]:
        """The ids of an observation in place of a prompt."""

    def fits(self, characters: int, room: int) -> bool:
        """Whether an observation of so many characters may fit into `room` tokens."""


class PlainBridge:
    """The ids of the observation's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._encoding, self._first = Encoding(tokenizer), encode_prompt(tokenizer, "")
        self.fits = self._encoding.fits

    def after(self, turn: Sequence[int], observation: str | list[Message], before: Begin = ()) -> list[int]:
        return self._encoding.plain(_text(observation))

    def whole(self, observation: str | list[Message]) -> list[int]:
        return [*self._first, *self._encoding.plain(_text(observation))]


class _Frame(NamedTuple):
    """What a template writes after the text of a turn, around the contents of messages. `ended`: the first of
    `pieces` if the turn has one of `ends`. `by_calls`: it takes results of tools only behind their calls."""

    pieces: list[str]
    ends: frozenset[int]
    ended: str
    by_calls: bool


class TemplateBridge:
    """What the bridges of chat prompts share.

    Args:
        role: of an observation that is a text.
        arguments: of the chat template.
        tools: schemas of the tools in the prompt.
        ends: ids that end a turn of this model.
    """

    def __init__(
        self,
        tokenizer: Any,
        role: str,
        arguments: Mapping[str, Any],
        tools: Sequence[Any] = (),
        ends: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._role, self._ends = tokenizer, role, frozenset(ends)
        self._arguments = {**arguments, **({"tools": list(tools)} if tools else {})}
        self._tools = tools
        self._encoding, self._text = Encoding(tokenizer), ConversationText(tokenizer, arguments)
        self.fits = self._encoding.fits
        self._prepare()

    def _prepare(self) -> None:
        """Raises: ConfigError: turns cannot be appended to what the template writes."""

    def whole(self, observation: str | list[Message]) -> list[int]:
        """Raises: ConfigError: the template leaves out a message."""
        try:
            return self._text.ids(_numbered(self._messages(observation)), self._tools)
        except DataError as error:
            raise ConfigError(str(error)) from error

    def _messages(self, observation: str | list[Message]) -> list[Message]:
        if isinstance(observation, str):
            observation = [{"role": self._role, "content": observation}]
        return [_message(one) for one in observation]

    def _render(self, messages: Sequence[Message], prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    _numbered(messages), tokenize=False, add_generation_prompt=prompt, **self._arguments
                )
            )
        except Exception as error:  # a template is a program
            roles = ", ".join(one["role"] for one in messages)
            raise ConfigError(
                f"the chat template cannot render messages of the roles {roles}: "
                f"{type(error).__name__}: {error}\n  Use another template, or set `reward.role`."
            ) from error


class ChatBridge(TemplateBridge):
    """The end of the model's message, messages with the observation, and the begin of the next message, as
    the chat template writes them.

    The template renders a conversation of place holders once. Its text around them is encoded with special
    tokens. A content is encoded without them, so it cannot end a message. A turn that any end of the model
    has ended gets no second one, unless the template's end is the begin of the next message (GLM).

    Raises: ConfigError: the template rewrites earlier messages, so no text follows them. An empty block
        `<think>` at the begin of a reply is no rewriting: the model saw what its prompt had.
    """

    def _prepare(self) -> None:
        self._frames: dict[tuple[Any, ...], _Frame] = {}
        role = "tool" if "tools" in self._arguments else self._role
        self._frame([{"role": role, "content": ""}], _BEGUN)

    def after(self, turn: Sequence[int], observation: str | list[Message], before: Begin = ()) -> list[int]:
        """Raises: ConfigError: the template cannot append messages of these roles."""
        messages, begun = self._messages(observation), self._begun(before)
        frame = self._frame(messages, begun)
        begin = frame.ended if set(turn[-1:]) & frame.ends else frame.pieces[0]
        ids = self._encoding.template(begin)
        contents = [self._written(frame, messages, index, begun) for index in range(len(messages))]
        behind = self._behind(begun, messages, frame.by_calls)
        framed = "".join(text + piece for text, piece in zip(contents, frame.pieces[1:], strict=True))
        if behind != frame.pieces[0] + framed and behind.startswith(frame.pieces[0]):
            return ids + self._switched(behind, begun, messages, frame)
        for text, piece in zip(contents, frame.pieces[1:], strict=True):
            ids += self._encoding.plain(text) + self._encoding.template(piece)
        return ids

    def _begun(self, before: Begin) -> list[Message]:
        """A conversation that began so, up to the first reply."""
        messages = self._messages(before) if isinstance(before, str) else list(before)
        asked = any(one["role"] != "system" for one in messages)
        return [*messages, *_BEGUN[asked:]]

    def _switched(
        self, behind: str, begun: list[Message], messages: list[Message], frame: _Frame
    ) -> list[int]:
        """Of messages with a text that the template reads, such as `/no_think`: what it writes then."""
        try:
            guard, guarded = self._text.guarded(
                messages, behind, lambda given: self._behind(begun, given, frame.by_calls)
            )
        except DataError as error:
            raise ConfigError(str(error)) from error
        first, *others = guarded[len(frame.pieces[0]) :].split(guard)
        return self._encoding.template(first) + self._text.guarded_ids(others)

    def _written(self, frame: _Frame, messages: list[Message], index: int, begun: list[Message]) -> str:
        """The content of a message as the template writes it: some remove space, others write JSON."""
        marked = _marked(messages)
        given = [*marked[:index], messages[index], *marked[index + 1 :]]
        tail = self._behind(begun, given, frame.by_calls)
        before = _joined(frame.pieces[: index + 1], 0)
        behind = _joined(frame.pieces[index + 1 :], index + 1)
        fits = tail.startswith(before) and tail.endswith(behind) and len(tail) >= len(before) + len(behind)
        return tail[len(before) : len(tail) - len(behind)] if fits else messages[index]["content"]

    def _frame(self, messages: list[Message], begun: list[Message]) -> _Frame:
        shape = (
            blake2b(json.dumps(begun, sort_keys=True, default=str).encode()).digest(),
            *((one["role"], one.get("name", "")) for one in messages),
        )
        frame = self._frames.get(shape)  # another thread may clear the table
        if frame is None:
            frame = self._new_frame(_marked(messages), begun)
            if len(self._frames) >= FRAMES_MAX:
                self._frames.clear()
            self._frames[shape] = frame
        return frame

    def _new_frame(self, marked: list[Message], begun: list[Message]) -> _Frame:
        contents = [one["content"] for one in marked]
        by_calls = not self._appends(marked, begun) and self._appends_to_calls(marked, begun)
        behind = self._behind(begun, marked, by_calls)
        pieces = re.split("|".join(contents), behind)
        end, ended = self._encoding.behind_first_special(pieces[0])
        return _Frame(pieces, frozenset() if end is None else self._replaced(end), ended, by_calls)

    def _behind(self, begun: list[Message], messages: Sequence[Message], by_calls: bool) -> str:
        """What the template writes behind a reply that `messages` follow. `by_calls`: the end of the reply,
        and what it writes behind the calls of `messages`."""
        if not by_calls:
            return self._render([*begun, *messages], True).partition(_REPLY)[2]
        called: list[Any] = [*begun[:-1], self._calls(messages)]
        added = self._render([*called, *messages], True)[len(self._render(called, False)) :]
        return self._render(begun, False).partition(_REPLY)[2] + added

    def _appends(self, marked: list[Message], begun: list[Message]) -> bool:
        """Whether the template leaves what is before them. Some take results of tools behind calls alone.

        Raises: ConfigError: it does not, and they are no results of tools."""
        try:
            seen = self._render(begun[:-1], True)
            before, *others = self._render([*begun, *marked], True).split(_REPLY)
            longer = self._render([*begun, *marked, begun[-1], *marked], True).split(_REPLY)
        except ConfigError:
            if marked[0]["role"] != "tool":
                raise
            return False
        appends = (
            len(others) == 1
            and len(longer) == 3
            and _bare(before) == _bare(longer[0]) == _bare(seen)
            and _bare(longer[1]) == _bare(others[0])
            and longer[2] == others[0]
            and all(others[0].count(one["content"]) == 1 for one in marked)
        )
        if not appends and marked[0]["role"] != "tool":
            raise self._rewrites(marked)
        return appends

    def _appends_to_calls(self, marked: list[Message], begun: list[Message]) -> bool:
        """Raises: ConfigError: the template rewrites the calls when their results follow."""
        called: list[Any] = [*begun[:-1], self._calls(marked)]
        closed, written = self._render(called, False), self._render([*called, *marked], True)
        again = self._render([*called, *marked, *called[-1:], *marked], True)
        added = written.removeprefix(closed)
        if (
            added == written
            or not again.startswith(_bare(written))
            or not again.endswith(added)
            or any(added.count(one["content"]) != 1 for one in marked)
        ):
            raise self._rewrites(marked)
        return True

    def _calls(self, messages: Sequence[Message]) -> dict[str, Any]:
        results = [one for one in messages if one["role"] == "tool"]
        names = [tool["function"]["name"] for tool in self._tools] or ["call"]
        calls = [
            {
                "id": CALL_ID.format(number),
                "type": "function",
                "function": {"name": one.get("name", names[0]), "arguments": {}},
            }
            for number, one in enumerate(results, 1)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _rewrites(self, messages: list[Message]) -> ConfigError:
        return ConfigError(
            "the chat template rewrites earlier messages when a message of role "
            f"{messages[0]['role']!r} follows: turns cannot be appended exactly\n"
            "  Use another template or role (`reward.role`), or `task.chat = false`."
        )

    def _replaced(self, end: int) -> frozenset[int]:
        """The ends that may stand in place of `end`, the first special token behind a reply. In GLM's
        template that token begins the next message: no other end may stand in its place."""
        closed = ""
        with suppress(ConfigError):  # some templates want a question at the end
            closed = self._render(_BEGUN, False).partition(_REPLY)[2]
        closes = self._encoding.behind_first_special(closed)[0] == end
        return self._ends | {end} if closes else frozenset({end})


_BEGUN: list[Message] = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": _REPLY}]


def _text(observation: str | list[Message]) -> str:
    texts = observation if isinstance(observation, str) else "\n".join(m["content"] for m in observation)
    return encodable(texts)


def _message(one: Message) -> Message:
    words = {key: text for key, text in one.items() if key in ("role", "name")}
    return {**words, "content": encodable(one["content"])}


def _marked(messages: Sequence[Message]) -> list[Message]:
    return [{**one, "content": _CONTENT.format(index)} for index, one in enumerate(messages)]


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Results of tools get the ids of their calls."""
    numbered, calls = [], 0
    for one in messages:
        calls = calls + 1 if one["role"] == "tool" else 0
        numbered.append({"tool_call_id": CALL_ID.format(calls), **one} if calls else one)
    return numbered


def _joined(pieces: Sequence[str], first: int) -> str:
    """Pieces with place holders between them; the first place holder has the number `first`."""
    text = pieces[0]
    for index, piece in enumerate(pieces[1:], first):
        text += _CONTENT.format(index) + piece
    return text


def _bare(text: str) -> str:
    """Without the begin of thinking at the end, and without space there."""
    return _THINKING.sub("", text.rstrip()).rstrip()
