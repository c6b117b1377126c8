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

from millrace.conversations.conversation_text import ConversationText
from millrace.conversations.encoding import Encoding, encodable
from millrace.conversations.tokenizer import encode_prompt
from millrace.conversations.tool_calls import CALL_ID
from millrace.core.errors import ConfigError, DataError
from millrace.episodes.environment import Message

_REPLY, _CONTENT = "xReplyx", "xContent{}x"
_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_DIGITS = re.compile(r"\d+")

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
    `pieces` behind a turn that ends with this token. `by_calls`: it takes results of tools only behind their
    calls."""

    pieces: list[str]
    ended: dict[int, str]
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
        first = frame.ended.get(turn[-1] if turn else -1, frame.pieces[0])
        contents = [self._written(frame, messages, index, begun) for index in range(len(messages))]
        behind = self._behind(begun, messages, frame.by_calls)
        framed = "".join(text + piece for text, piece in zip(contents, frame.pieces[1:], strict=True))
        if behind != frame.pieces[0] + framed and behind.startswith(frame.pieces[0]):
            return self._switched(first, behind, begun, messages, frame)
        return self._text.framed_ids([first, *frame.pieces[1:]], contents)

    def _begun(self, before: Begin) -> list[Message]:
        """A conversation that began so, up to the first reply."""
        messages = self._messages(before) if isinstance(before, str) else list(before)
        asked = any(one["role"] != "system" for one in messages)
        return [*messages, *_BEGUN[asked:]]

    def _switched(
        self, first: str, behind: str, begun: list[Message], messages: list[Message], frame: _Frame
    ) -> list[int]:
        """Of messages with a text that the template reads, such as `/no_think`: what it writes then."""
        try:
            guard, guarded = self._text.guarded(
                messages, behind, lambda given: self._behind(begun, given, frame.by_calls)
            )
        except DataError as error:
            raise ConfigError(str(error)) from error
        return self._text.guarded_ids(guard, first + guarded[len(frame.pieces[0]) :])

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
        by_calls = self._by_calls(marked, begun)
        behind = self._behind(begun, marked, by_calls)
        pieces = re.split("|".join(contents), behind)
        return _Frame(pieces, self._ended(pieces[0]), by_calls)

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
        asked, answered = self._asked(begun[:-1]), self._asked([*begun, *marked]).rpartition(_REPLY)[2]
        appends = (
            len(others) == 1
            and len(longer) == 3
            and _same_up_to_reply(asked, seen, before)
            and _same_up_to_reply(asked, before, longer[0])
            and _same_up_to_reply(answered, others[0], longer[1])
            and longer[2] == others[0]
            and all(others[0].count(one["content"]) == 1 for one in marked)
        )
        if not appends and marked[0]["role"] != "tool":
            raise self._rewrites(marked)
        return appends

    def _asked(self, messages: Sequence[Message]) -> str:
        """Without the head of a reply; empty: the template cannot."""
        try:
            return self._render(messages, False)
        except ConfigError:
            return ""

    def _by_calls(self, marked: list[Message], begun: list[Message]) -> bool:
        """Whether results of tools are to be written behind their calls: the template takes them nowhere
        else, or writes more there, such as the name of the tool.

        Raises: ConfigError: the template rewrites what the model saw, or numbers the calls."""
        appends = self._appends(marked, begun)
        if marked[0]["role"] != "tool":
            return False
        called: list[Any] = [*begun[:-1], self._calls(marked)]
        later = [
            {**one, "tool_call_id": CALL_ID.format(number)}
            for number, one in enumerate(marked, len(marked) + 1)
        ]
        try:
            closed, written = self._render(called, False), self._render([*called, *marked], True)
            again = self._render([*called, *marked, self._calls(later, len(marked) + 1), *later], True)
        except ConfigError:
            if appends:
                return False
            raise
        for number in range(1, len(marked) + 1):
            again = again.replace(CALL_ID.format(len(marked) + number), CALL_ID.format(number))
        tail = written[len(_shared_begin(closed, written)) :]
        if not again.endswith(tail) and _DIGITS.sub("0", again).endswith(_DIGITS.sub("0", tail)):
            raise ConfigError(
                "the chat template numbers the calls of a conversation, and a result names the number of its "
                "call: a result that is appended alone would name another call\n  Use another template."
            )
        follows = (
            written.startswith(closed)
            and (
                _bare(again).startswith(_bare(written))
                or _same_up_to_reply(self._asked([*called, *marked]), written, again)
            )
            and again.endswith(tail)
            and all(tail.count(one["content"]) == 1 for one in marked)
        )
        if not follows and not appends:
            raise self._rewrites(marked)
        return follows and not (appends and _bare(self._behind(begun, marked, False)).endswith(_bare(tail)))

    def _calls(self, messages: Sequence[Message], first: int = 1) -> dict[str, Any]:
        results = [one for one in messages if one["role"] == "tool"]
        names = [tool["function"]["name"] for tool in self._tools] or ["call"]
        calls = [
            {
                "id": CALL_ID.format(number),
                "type": "function",
                "function": {"name": one.get("name", names[0]), "arguments": {}},
            }
            for number, one in enumerate(results, first)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _rewrites(self, messages: list[Message]) -> ConfigError:
        return ConfigError(
            "the chat template rewrites earlier messages when a message of role "
            f"{messages[0]['role']!r} follows: turns cannot be appended exactly\n"
            "  Use another template or role (`reward.role`), or `task.chat = false`."
        )

    def _ended(self, piece: str) -> dict[int, str]:
        """What follows a turn, by the token that has ended it: what `piece` has behind that token. The
        model's other ends stand in place of the last one that closes a message. In GLM's template the first
        token begins the next message: no other end may stand in its place."""
        closed = ""
        with suppress(ConfigError):  # some templates want a question at the end
            closed = self._render(_BEGUN, False).partition(_REPLY)[2]
        first, behind = self._encoding.behind_first_special(piece)
        if first is None:
            return {}
        ended, rest = {first: behind}, behind
        if self._encoding.behind_first_special(closed)[0] != first:
            return ended
        closed = _shared_begin(closed, piece)
        while (token := self._encoding.behind_first_special(rest)[0]) is not None:
            rest = self._encoding.behind_first_special(rest)[1]
            if len(piece) - len(rest) > len(closed):
                break
            ended.setdefault(token, rest)
            behind = rest if token in self._ends else behind
        return {**dict.fromkeys(self._ends, behind), **ended}


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


def _same_up_to_reply(asked: str, one: str, other: str) -> bool:
    """Whether two texts are the same up to the head of a reply, but for space. The head of a reply in a
    prompt may open thinking, or leave to the model what the template writes of a reply that is history.

    `asked`: the text without a head; empty: unknown."""
    one, other, asked = _bare(one), _bare(other), _bare(asked)
    return one == other or bool(asked and one.startswith(asked) and other.startswith(asked))


def _shared_begin(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _bare(text: str) -> str:
    """Without space, and without the begin of thinking at the end."""
    return "".join(_THINKING.sub("", text.rstrip()).split())
