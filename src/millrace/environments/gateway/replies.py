"""A sampled turn as a reply: its text, its reasoning and its calls of tools."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from millrace.environments.gateway.calls import Call, CallFinish, CallOfTool, Reply
from millrace.environments.turns.environment import SampledTurn
from millrace.environments.turns.tool_calls import ToolCall, find_calls

_THINK, _THOUGHT, _TAG = "<think>", "</think>", "<tool_call>"


class Replies:
    """`plain`: nothing shows tools to the model, so a call is a line `name(...)`."""

    def __init__(self, tokenizer: Any, *, plain: bool) -> None:
        self._tokenizer, self._plain = tokenizer, plain

    def make(self, name: str, call: Call, prompt_ids: Sequence[int], turn: SampledTurn) -> Reply:
        """The reply to a call. `name`: of the reply. The same turn makes the same reply, so that a repeated
        agent sees the same ids."""
        text = self._text(turn.ids)
        reasoning, content = _thought(text)
        calls = self._calls(name, call, content)
        finish: CallFinish = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
        return Reply(
            id=name,
            created=int(time.time()),
            model=call.model,
            text=text,
            content=content.partition(_TAG)[0].strip() if calls else content,
            reasoning=reasoning,
            calls=tuple(calls),
            finish=finish,
            prompt_ids=list(prompt_ids),
            ids=turn.ids,
            pieces=[self._text([one], special=True) for one in turn.ids] if call.logprobs else [],
            logprobs=turn.logprobs or [0.0] * len(turn.ids),  # a turn that was given, not sampled
        )

    def _calls(self, name: str, call: Call, content: str) -> list[CallOfTool]:
        """A text with a malformed call has no calls: the agent gets the text."""
        if not call.tools:
            return []
        functions = {one["function"]["name"]: one["function"] for one in call.tools}
        found = find_calls(content, functions, plain=self._plain)
        calls = [one for one in found if isinstance(one, ToolCall)]
        if len(calls) < len(found):
            return []
        return [
            CallOfTool(f"call_{name}_{number}", one.name, _arguments(one, functions.get(one.name, {})))
            for number, one in enumerate(calls)
        ]

    def _text(self, ids: Sequence[int], special: bool = False) -> str:
        decode: Callable[..., str] = self._tokenizer.decode
        return decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def _thought(text: str) -> tuple[str, str]:
    """(reasoning, the rest). A template may have begun the reasoning."""
    before, ended, behind = text.partition(_THOUGHT)
    if ended:
        return before.removeprefix(_THINK).strip(), behind.strip()
    return (text.removeprefix(_THINK).strip(), "") if text.startswith(_THINK) else ("", text)


def _arguments(call: ToolCall, function: dict[str, Any]) -> str:
    """Arguments without a name have the names of the schema, in order."""
    names = list((function.get("parameters") or {}).get("properties") or {})
    named = dict(zip(names, call.positional, strict=False))
    return json.dumps(named | call.arguments, ensure_ascii=False, default=str)
