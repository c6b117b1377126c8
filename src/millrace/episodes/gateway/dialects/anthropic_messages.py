"""Anthropic's Messages: `/v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, Reply, from_value, to_object
from millrace.episodes.gateway.dialects.fields import (
    CONSTRAINS,
    CONSTRAINTS,
    Fields,
    decode,
    take_arguments,
)
from millrace.episodes.gateway.dialects.shapes import event, part_text, plain_text, slices, take_tools

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def write_message(reply: Reply) -> dict[str, Any]:
    """Without calls there is a text, even if it is empty."""
    usage = {
        "input_tokens": len(reply.prompt_ids),
        "output_tokens": len(reply.ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [block for block, _ in _reply_blocks(reply)],
        "stop_reason": "stop_sequence" if reply.stop else STOP_REASONS[reply.finish],
        "stop_sequence": reply.stop or None,
        "usage": usage,
    }


def message_events(reply: Reply) -> Iterator[bytes]:
    for fields in _events(reply):
        yield event(fields, fields["type"])


def signature(reply_id: str) -> str:
    """Anthropic signs thinking. A client sends the signature back as it came. Nobody checks this one."""
    return base64.b64encode(hashlib.sha256(reply_id.encode()).digest()).decode()


def _reply_blocks(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each block, with its deltas."""
    if reply.reasoning:
        signed = {"signature": signature(reply.id)}
        deltas = [{"type": "thinking_delta", "thinking": one} for one in slices(reply.reasoning)]
        block = {"type": "thinking", "thinking": reply.reasoning, **signed}
        yield block, [*deltas, {"type": "signature_delta", **signed}]
    if reply.content or not reply.calls:
        deltas = [{"type": "text_delta", "text": one} for one in slices(reply.content)]
        yield {"type": "text", "text": reply.content}, deltas
    for call in reply.calls:
        arguments = to_object(call.arguments)
        deltas = [{"type": "input_json_delta", "partial_json": one} for one in slices(from_value(arguments))]
        called = {"id": call.id, "name": call.name, "input": arguments}
        yield {"type": "tool_use", **called}, deltas


EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""The fields of a block that its deltas fill."""


def _events(reply: Reply) -> Iterator[dict[str, Any]]:
    message = write_message(reply)
    usage = message["usage"]
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**usage, "output_tokens": 0}
    yield {"type": "message_start", "message": {**message, **begun}}
    for index, (block, deltas) in enumerate(_reply_blocks(reply)):
        yield {
            "type": "content_block_start",
            "index": index,
            "content_block": {**block, **EMPTY[block["type"]]},
        }
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


BILLING = "x-anthropic-billing-header"
"""Begins a block that Claude Code puts before its system prompt. The block changes with each request, and is
no text for the model."""


class MessagesDialect:
    def read(self, body: bytes) -> Call:
        """Raises: RefusedCall: also where the last message is the assistant's, which a turn would go on."""
        fields = decode(body)
        call = self._read(fields)
        if call.messages[-1].role == "assistant":
            fields.refuse("messages", "ends with the assistant's: each turn begins anew. End with the user's")
        return call

    def read_count(self, body: bytes) -> Call:
        """The request to count the tokens of a prompt."""
        return self._read(decode(body))

    def counted(self, num_tokens: int) -> dict[str, Any]:
        """The answer to the request to count."""
        return {"input_tokens": num_tokens}

    def _read(self, fields: Fields) -> Call:
        call = Call(model=fields.text("model"))
        fields.refuse_given(CONSTRAINTS, CONSTRAINS)
        fields.refuse_given(("mcp_servers", "container"), "is not here: tools are those that the agent runs")
        fields.refuse_given(("output_format",), CONSTRAINS)
        output = fields.inner("output_config")
        output.refuse_given(("format",), CONSTRAINS)
        system = _system(fields, call)
        messages = [turn for message in fields.objects("messages") for turn in _turns(message)]
        if not messages:
            fields.refuse("messages", "has no message")
        call.messages = [*system, *messages]
        take_tools(fields, call, schema="input_schema", kind="custom")
        call.max_tokens = fields.integer("max_tokens", 1)
        call.stop = fields.strings("stop_sequences")
        call.stream = fields.flag("stream")
        call.unheeded |= {**fields.rest, **({"output_config": output.rest} if output.rest else {})}
        return call

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        return write_message(reply)

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        return message_events(reply)

    def error(self, status: int, message: str, field: str | None = None) -> dict[str, Any]:
        return anthropic_error(status, message)

    def error_event(self, status: int, message: str, field: str | None = None) -> bytes:
        return event(anthropic_error(status, message), "error")


def _system(fields: Fields, call: Call) -> list[ChatTurn]:
    system = fields.take("system")
    if isinstance(system, list):
        billing = [one for one in system if isinstance(one, dict) and _is_billing(one.get("text"))]
        call.unheeded |= {BILLING: [one["text"] for one in billing]} if billing else {}
        system = [one for one in system if not any(one is other for other in billing)]
    content = plain_text(system, "system")
    return [ChatTurn(role="system", content=content)] if content else []


def _is_billing(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(f"{BILLING}:")


def _turns(message: Fields) -> list[ChatTurn]:
    content = message.take("content")
    texts = content is None or isinstance(content, str)
    blocks = [Fields({"type": "text", "text": content or ""})] if texts else _blocks(message, content)
    match message.text("role"):
        case "assistant":
            return [_assistant(blocks)]
        case "user":
            return _of_user(blocks, "user")
        case "system":
            return _of_user(blocks, "system")
    message.refuse("role", "must be user, assistant or system")


def _blocks(message: Fields, content: Any) -> list[Fields]:
    return Fields({"content": content}, message.where).objects("content")


def _assistant(blocks: list[Fields]) -> ChatTurn:
    """Thinking whose text is hidden has no text here. A signature says nothing."""
    content, reasoning = "", ""
    calls: list[CallOfTool] = []
    for block in blocks:
        match block.text("type"):
            case "thinking":
                reasoning += block.text("thinking")
            case "redacted_thinking":
                pass
            case "tool_use":
                name, call_id = block.named("name"), block.text("id")
                calls.append(CallOfTool(call_id, name, take_arguments(block, "input")))
            case kind:
                content += _text(block, kind)
    return ChatTurn(role="assistant", content=content, calls=tuple(calls), reasoning=reasoning)


def _of_user(blocks: list[Fields], role: Any) -> list[ChatTurn]:
    """Each result of a tool is a turn. So are texts between results, joined. The order is kept.

    A failed tool is told by its text: `is_error` changes nothing.
    """
    turns: list[ChatTurn] = []
    kinds = [(block, block.text("type")) for block in blocks]
    for results, group in groupby(kinds, key=lambda pair: pair[1] == "tool_result"):
        if results:
            turns += (_result(block) for block, _ in group)
        else:
            turns.append(ChatTurn(role=role, content="".join(_text(block, kind) for block, kind in group)))
    return turns or [ChatTurn(role=role)]


def _result(block: Fields) -> ChatTurn:
    content = plain_text(block.take("content"), block.path("content"))
    return ChatTurn(role="tool", content=content, call_id=block.text("tool_use_id"))


def _text(block: Fields, kind: str) -> str:
    return part_text({**block.rest, "type": kind}, block.where)
