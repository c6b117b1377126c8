"""A reply as Anthropic's message, as the events of its stream, and errors."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

from millrace.episodes.gateway.arguments import from_value, to_object
from millrace.episodes.gateway.calls import Reply
from millrace.episodes.gateway.dialects.shapes import event, slices

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
        "content": [block for block, _ in _blocks(reply)],
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


def _blocks(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
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
    for index, (block, deltas) in enumerate(_blocks(reply)):
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
