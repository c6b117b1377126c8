"""A sampled turn as a reply: its text, its reasoning and its calls of tools."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from millrace.conversations.call_forms import NO_STYLE, CallStyle
from millrace.conversations.call_reader import CallReader
from millrace.conversations.encoding import encodable
from millrace.conversations.tool_calls import Calls, ToolCall
from millrace.core.turns.stop_strings import StopStrings, before_stop
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call, CallFinish, CallOfTool, Reply
from millrace.episodes.harmony import turn_reader


class Replies:
    """`style`: of the chat template. Where nothing shows tools to the model, a call is a line `name(...)`.
    `end_ids`, `stop`: what ends each turn of the run."""

    def __init__(
        self,
        tokenizer: Any,
        style: CallStyle = NO_STYLE,
        *,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self.end_ids, self._stop = tokenizer, end_ids, stop
        self._read, self._named_ids = turn_reader(tokenizer), style.named_ids
        self._reader = CallReader(style.form, plain=not style.shows_tools, is_opened=style.opens_thinking)

    def make(self, name: str, call: Call, prompt_ids: Sequence[int], turn: SampledTurn) -> Reply:
        """The reply to a call. `name`: of the reply. The same turn makes the same reply, so that a repeated
        agent sees the same ids."""
        text, stop = before_stop(self._text(turn.ids), call.stop)
        read = self._read(turn.ids, call.stop)
        is_cut = turn.finish == "length" or self._is_cut(call, turn.ids)
        parts = self._reader.read(read, _schemas(call), is_cut=is_cut)
        calls = self._calls(name, call, parts.calls)
        if parts.calls and not calls:  # the agent gets the text of what is no call of its tools
            parts = self._reader.read(read, {}, is_cut=is_cut)
        finish: CallFinish = "length" if is_cut else "tool_calls" if calls else "stop"
        return Reply(
            id=name,
            created=int(time.time()),
            model=call.model,
            text=text if call.prompt is not None else str(read),
            content=parts.content,
            reasoning=parts.reasoning,
            calls=tuple(calls),
            finish=finish,
            stop=stop,
            prompt_ids=list(prompt_ids),
            ids=turn.ids,
            pieces=[self._text([one], special=True) for one in turn.ids] if call.logprobs else [],
            logprobs=turn.logprobs or [0.0] * len(turn.ids),  # a turn that was given, not sampled
        )

    def _is_cut(self, call: Call, ids: Sequence[int]) -> bool:
        """Whether a turn has as many tokens as the call wants, and nothing else ended it. The record says so
        of no turn but the last, and a repeated agent gets the same answer."""
        if len(ids) != call.max_tokens or ids[-1] in self.end_ids or ids[-1] in call.stop_ids:
            return False
        strings = [*self._stop, *map(encodable, call.stop)]
        return not (strings and StopStrings(partial(self._text, special=True), strings).hit(ids))

    def _calls(self, name: str, call: Call, read: Calls) -> list[CallOfTool]:
        """A text with a malformed call, or one of a tool that is not on offer, has no calls: an SDK would
        raise an error at that."""
        functions = {one["function"]["name"]: one["function"] for one in call.tools}
        if not all(isinstance(one, ToolCall) and one.name in functions for one in read):
            return []
        before = sum(len(one.calls) for one in call.messages)
        return [
            CallOfTool(
                f"functions.{one.name}:{before + number}" if self._named_ids else f"call_{name}_{number}",
                one.name,
                _arguments(one, functions[one.name]),
            )
            for number, one in enumerate(read)
            if isinstance(one, ToolCall)
        ]

    def _text(self, ids: Sequence[int], special: bool = False) -> str:
        decode: Callable[..., str] = self._tokenizer.decode
        return decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def _schemas(call: Call) -> dict[str, dict[str, Any]]:
    return {one["function"]["name"]: one["function"].get("parameters") or {} for one in call.tools}


def _arguments(call: ToolCall, function: dict[str, Any]) -> str:
    """Arguments without a name have the names of the schema, in order."""
    names = list((function.get("parameters") or {}).get("properties") or {})
    named = dict(zip(names, call.positional, strict=False))
    return json.dumps(named | call.arguments, ensure_ascii=False, default=str)
