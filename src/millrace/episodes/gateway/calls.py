"""A request of an agent and the reply, in no dialect."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from millrace.core.errors import DataError

WHOLE_BELOW = 1e21
"""JavaScript writes a smaller number without a fraction as an integer."""


def canonical(arguments: str) -> str:
    """The same JSON value in one spelling: of spaces, escapes and whole numbers. The order of keys is kept.

    A program parses the arguments and writes them again in the spelling of its language. Half of a pair of
    surrogates has no UTF-8, and becomes U+FFFD. A text that is no JSON, or has no end of nesting, is itself.
    """
    try:
        return from_value(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def from_value(value: Any) -> str:
    """Raises: ValueError: a number is infinite or none. RecursionError: the value is nested too deep."""
    text = json.dumps(_with_whole_numbers(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_object(arguments: str) -> dict[str, Any]:
    """The table of arguments. A text that is no JSON object is the one argument `arguments`."""
    try:
        value = json.loads(canonical(arguments))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < WHOLE_BELOW:
        return int(value)
    return value


CallFinish = Literal["stop", "length", "tool_calls"]


RETRY_AFTER_S_MAX = 60
"""OpenAI's SDK tries again after as long as it is told up to 120 s, and beyond that not at all. Others obey
a minute."""


class RefusedCall(DataError):
    """A request that is not answered by a turn. `status`: of HTTP. `field`: of the request, if one is to
    blame. `retry_after_s`: the same request may be answered after so long, and at most `RETRY_AFTER_S_MAX`;
    None: it will not be."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        field: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.retry_after_s = status, field, retry_after_s
        if retry_after_s is not None and not (
            0 < retry_after_s <= RETRY_AFTER_S_MAX and (status in (408, 429) or status >= 500)
        ):
            raise ValueError(f"no SDK repeats a request after status {status} and {retry_after_s} s")


class CallOfTool(msgspec.Struct, frozen=True):
    """`arguments`: a JSON object as text. Requests have it in the spelling of `canonical`."""

    id: str
    name: str
    arguments: str


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `calls` and `reasoning`: of the assistant. `call_id`: the call that a tool answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    calls: tuple[CallOfTool, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""


class Call(msgspec.Struct, kw_only=True):
    """One request for one turn.

    `messages` is the whole conversation. In place of messages, `prompt` is a text or token ids. `tools` are
    JSON Schemas in OpenAI's form `{"type": "function", "function": {...}}`. `unheeded`: fields of the request
    that change nothing, such as `temperature`, because the run decides them. `usage`: a stream ends with the
    counts of tokens. `stop_ids`: tokens that end the turn.
    """

    messages: list[ChatTurn] = []
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = []
    max_tokens: int | None = None
    stop: list[str] = []
    stop_ids: list[int] = []
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    model: str = ""
    unheeded: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled turn. `pieces` are the texts of the ids; `logprobs` are those of sampling, in nats.

    `id` is letters and digits: a dialect puts its own prefix before the id.

    `content` is the text without reasoning and calls. `text` is the whole text of the ids, without special
    tokens. Both end before `stop`, the stop string of the request that has ended the turn; empty: none has.
    A reply without ids was not sampled: it ends an agent whose budget is used up.
    """

    id: str
    created: int
    model: str
    text: str
    content: str
    reasoning: str = ""
    calls: tuple[CallOfTool, ...] = ()
    finish: CallFinish = "stop"
    stop: str = ""
    prompt_ids: list[int] = []
    ids: list[int] = []
    pieces: list[str] = []
    logprobs: list[float] = []

    @property
    def turn(self) -> ChatTurn:
        """The turn as the agent's next request has it. Equal to what every chat dialect reads."""
        calls = tuple(CallOfTool(one.id, one.name, canonical(one.arguments)) for one in self.calls)
        return ChatTurn(role="assistant", content=self.content, calls=calls, reasoning=self.reasoning)
