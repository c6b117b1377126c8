"""Where the prompt of a call belongs: behind an earlier turn, or in a sequence of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from millrace.core.completion.forks import num_shared
from millrace.core.errors import ConfigError
from millrace.episodes.gateway.calls import Call, ChatTurn, RefusedCall, Reply, canonical
from millrace.episodes.gateway.rendering import PlainRendering, Rendering

TEMPLATE, TOOLS, HISTORY, OTHER = "template", "tools", "history", "other"
CAUSES = (TEMPLATE, TOOLS, HISTORY, OTHER)
"""Why a call begins a sequence: the template rewrote earlier messages; the tools changed; the agent rewrote
its history; the call has another begin, as that of a second agent has."""


class CallPlace(NamedTuple):
    """`context`: all ids that the model sees. `ids`: those that are new behind turn `after`. `after`: None:
    behind the newest turn. 0: they stand in place of all, so `ids` is `context`. `cause`: of a sequence."""

    context: list[int]
    ids: list[int]
    after: int | None
    cause: str = ""


class _Turn(NamedTuple):
    call: Call
    context: list[int]
    ids: list[int]  # the sampled ones
    message: ChatTurn


class Conversation:
    """The calls of one agent, each with its reply."""

    def __init__(self, rendering: Rendering | PlainRendering) -> None:
        self._rendering = rendering
        self._turns = list[_Turn]()
        self.forks = Counter[str](dict.fromkeys(CAUSES, 0))
        self._unused = dict[int, str]()  # by the number of the turn, its text

    def place(self, call: Call) -> CallPlace:
        """Raises: RefusedCall: the call has no prompt that can be rendered."""
        cause = ""
        if call.prompt is None:
            _refuse_odd(call.messages)
            found, cause = self._appended(call)
            if found is not None:
                return found
            whole = self._rendering.whole(call.messages, call.tools)
        else:
            whole = self._rendering.prompt(call.prompt) if isinstance(call.prompt, str) else list(call.prompt)
        if not whole:
            raise RefusedCall("the prompt has no token")
        return self._by_prefix(whole, cause)

    def add(self, call: Call, place: CallPlace, reply: Reply) -> None:
        """The model has answered the call that has this place."""
        if self._turns and place.after == 0:
            self.forks[place.cause] += 1
        self._use(call, place)
        self._turns.append(_Turn(call, place.context, list(reply.ids), reply.turn))
        if not isinstance(call.prompt, list):
            self._unused[len(self._turns)] = reply.content.strip()

    @property
    def replies_unused(self) -> int:
        """Replies but the newest that no later request goes on from, and whose text none has. Prompts of ids
        say nothing."""
        return sum(number < len(self._turns) for number in self._unused)

    def _use(self, call: Call, place: CallPlace) -> None:
        """A call shows which earlier replies its agent uses."""
        self._unused.pop(len(self._turns) if place.after is None else place.after, None)
        if self._unused:
            seen = (
                call.prompt if isinstance(call.prompt, str) else "\n".join(m.content for m in call.messages)
            )
            self._unused = {number: text for number, text in self._unused.items() if text not in seen}

    def _appended(self, call: Call) -> tuple[CallPlace | None, str]:
        """The place behind the turn with the longest history that the call goes on from; or why none is."""
        cause = OTHER
        for number, turn in sorted(
            enumerate(self._turns, 1), key=lambda one: (len(one[1].call.messages), one[0]), reverse=True
        ):
            known = [*turn.call.messages, turn.message]
            if call.messages[:1] == known[:1] and cause == OTHER:
                cause = HISTORY
            tail = call.messages[len(known) :]
            if not _same(call.messages[: len(known)], known) or not tail:
                continue
            if call.tools != turn.call.tools and self._rendering.shows_tools:
                cause = TOOLS
                continue
            if any(one.role == "assistant" for one in tail):
                continue
            try:
                ids = self._rendering.after(turn.ids, tail, call.tools, call.messages)
            except ConfigError:
                cause = TEMPLATE
                continue
            return self._behind(number, ids), ""
        return None, cause

    def _by_prefix(self, whole: list[int], cause: str) -> CallPlace:
        """Behind the turn whose ids are the longest begin of the prompt. Text decides nothing."""
        best, most = 0, 0
        for number, turn in enumerate(self._turns, 1):
            length = len(turn.context) + len(turn.ids)
            if most < length < len(whole) and num_shared([*turn.context, *turn.ids], whole) == length:
                best, most = number, length
        return self._behind(best, whole[most:]) if best else CallPlace(whole, whole, 0, cause or OTHER)

    def _behind(self, number: int, ids: list[int]) -> CallPlace:
        turn = self._turns[number - 1]
        after = None if number == len(self._turns) else number
        return CallPlace([*turn.context, *turn.ids, *ids], ids, after)


def _same(messages: Sequence[ChatTurn], known: Sequence[ChatTurn]) -> bool:
    """Equal for a reader. The model saw its own ids, whatever space or reasoning an agent leaves out."""
    return len(messages) == len(known) and all(
        one == other or _compared(one, bool(one.reasoning)) == _compared(other, bool(one.reasoning))
        for one, other in zip(messages, known, strict=True)
    )


def _compared(one: ChatTurn, reasoning: bool) -> Any:
    if one.role != "assistant":
        return one
    calls = [(call.id, call.name, canonical(call.arguments)) for call in one.calls]
    return one.content.strip(), calls, reasoning and one.reasoning.strip()


def _refuse_odd(messages: Sequence[ChatTurn]) -> None:
    if not messages:
        raise RefusedCall("there are no messages", field="messages")
    if messages[-1].role == "assistant":
        raise RefusedCall(
            "the last message is the assistant's: a begun answer cannot be continued", field="messages"
        )
