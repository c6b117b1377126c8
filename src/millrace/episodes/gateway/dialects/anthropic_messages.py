"""Anthropic's Messages: `/v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, Reply
from millrace.episodes.gateway.dialects.anthropic_replies import (
    anthropic_error,
    message_events,
    write_message,
)
from millrace.episodes.gateway.dialects.fields import (
    CONSTRAINS,
    CONSTRAINTS,
    Fields,
    decode,
    take_arguments,
)
from millrace.episodes.gateway.dialects.shapes import event, part_text, plain_text, take_tools

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
