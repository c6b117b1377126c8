"""OpenAI's chat completions, with vLLM's fields for token ids and reasoning: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, Reply
from millrace.episodes.gateway.dialects.fields import (
    CONSTRAINS,
    CONSTRAINTS,
    Fields,
    decode,
    refuse_more_than_one,
    shown,
    take_alternatives,
    take_arguments,
)
from millrace.episodes.gateway.dialects.shapes import (
    DELTA_TOKENS,
    DONE,
    OpenAIErrors,
    event,
    plain_text,
    slices,
    take_tools,
    token_counts,
    token_logprobs,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
OLD = "is an older form of calls: write `tools` and `tool_calls`"


class ChatDialect(OpenAIErrors):
    def read(self, body: bytes) -> Call:
        fields = decode(body)
        call = Call(model=fields.text("model"))
        fields.refuse_given(("functions", "function_call"), OLD)
        fields.refuse_given(CONSTRAINTS, CONSTRAINS)
        fields.refuse_given(("audio", "web_search_options"), "is not for a model of text, without a search")
        fields.refuse_given(("continue_final_message",), "is not possible: each turn begins anew")
        refuse_more_than_one(fields, "n", "best_of")
        _refuse_formats(fields)
        call.messages = [_turn(message) for message in fields.objects("messages")]
        if not call.messages:
            fields.refuse("messages", "has no message")
        take_tools(fields, call, schema="parameters", nested=True)
        older, newer = fields.integer("max_tokens", 1), fields.integer("max_completion_tokens", 1)
        call.max_tokens = older if newer is None else newer
        call.stop = fields.strings("stop")
        call.stream = fields.flag("stream")
        call.usage = fields.inner("stream_options").flag("include_usage")
        call.logprobs = fields.flag("logprobs")
        call.top_logprobs = take_alternatives(fields, "top_logprobs") or 0
        call.token_ids = fields.flag("return_token_ids")
        call.unheeded |= fields.rest
        return call

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(one, one.arguments) for one in reply.calls]
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
        choice |= {**_ids(call, reply), **_logprobs(call, reply)}
        ids = {"prompt_token_ids": reply.prompt_ids} if call.token_ids else {}
        return {**_head(reply, "chat.completion"), "choices": [choice], "usage": token_counts(reply), **ids}

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        head = _head(reply, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None, **rest: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None, **rest}
            return event({**head, "choices": [choice]})

        # The first chunk has the ids: OpenAI's client keeps unknown fields of no other chunk.
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        first |= _ids(call, reply)
        ids = {"prompt_token_ids": reply.prompt_ids} if call.token_ids else {}
        yield event({**head, "choices": [first], **ids})
        for part in slices(reply.reasoning):
            yield chunk({"reasoning_content": part})
        for part in slices(reply.content):
            yield chunk({"content": part})
        for index, one in enumerate(reply.calls):
            yield chunk({"tool_calls": [{"index": index, **_call(one, "")}]})
            for part in slices(one.arguments):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
        for start in range(0, len(reply.ids) if call.logprobs else 0, DELTA_TOKENS):
            yield chunk({}, **_logprobs(call, reply, start, start + DELTA_TOKENS))
        yield chunk({}, reply.finish)
        if call.usage:
            yield event({**head, "choices": [], "usage": token_counts(reply)})
        yield DONE


def _refuse_formats(fields: Fields) -> None:
    if fields.inner("response_format").text("type") not in ("", "text"):
        fields.refuse("response_format", CONSTRAINS)
    if not set(fields.strings("modalities")) <= {"text"}:
        fields.refuse("modalities", "has more than text: the model writes text alone")


def _turn(message: Fields) -> ChatTurn:
    """Fields of a message that are not read here change nothing, such as `annotations` or `cache_control`."""
    role = message.text("role")
    if role not in ROLES:
        message.refuse("role", f"is {shown(role)}: it must be one of {', '.join(ROLES)}")
    content = plain_text(message.take("content"), message.path("content"))
    name = message.text("name")
    match role:
        case "system" | "developer" | "user" as role:
            return ChatTurn(role=role, content=content, name=name)
        case "tool":
            return ChatTurn(role="tool", content=content, name=name, call_id=message.text("tool_call_id"))
    message.refuse_given(("function_call",), OLD)
    calls = tuple(_read_call(one) for one in message.objects("tool_calls"))
    reasoning = message.text("reasoning_content") or message.text("reasoning")
    content = content or message.text("refusal")
    return ChatTurn(role="assistant", content=content, name=name, calls=calls, reasoning=reasoning)


def _read_call(fields: Fields) -> CallOfTool:
    if (kind := fields.take("type")) not in (None, "function"):
        fields.refuse("type", f"is {shown(kind)}: only functions are tools here")
    function = fields.inner("function")
    return CallOfTool(fields.text("id"), function.named("name"), take_arguments(function, "arguments"))


def _call(one: CallOfTool, arguments: str) -> dict[str, Any]:
    return {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": arguments}}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _ids(call: Call, reply: Reply) -> dict[str, Any]:
    return {"token_ids": reply.ids} if call.token_ids else {}


def _logprobs(call: Call, reply: Reply, start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Of the tokens from `start` to before `end`, if they are asked for."""
    if not call.logprobs:
        return {}
    content = token_logprobs(reply, call.top_logprobs, start, end)
    return {"logprobs": {"content": content, "refusal": None}}
