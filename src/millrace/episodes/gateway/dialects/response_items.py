"""Items of OpenAI's Responses: those of a request as turns, and a reply as items."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, Reply
from millrace.episodes.gateway.dialects.fields import Fields, shown, take_arguments
from millrace.episodes.gateway.dialects.shapes import plain_text, token_logprobs

ENCRYPTED = "millrace."
"""Begins the `encrypted_content` of reasoning: behind it is the text in base64, which is no secret here."""


def read_items(items: list[Fields]) -> list[ChatTurn]:
    """The turns, in order. Items of the assistant that follow each other are one turn.

    A reply has its reasoning first. So reasoning after a message or a call begins a turn of its own.
    """
    turns: list[ChatTurn] = []
    for item in items:
        part = _part(item)
        last = turns[-1] if turns else part
        if last is not part and part.role == last.role == "assistant" and not _begins(part, last):
            turns[-1] = replace(
                last,
                content=last.content + part.content,
                calls=last.calls + part.calls,
                reasoning=last.reasoning + part.reasoning,
            )
        else:
            turns.append(part)
    return turns


def _begins(part: ChatTurn, last: ChatTurn) -> bool:
    return bool(part.reasoning and (last.content or last.calls))


def _part(item: Fields) -> ChatTurn:
    """One item as a turn."""
    kind = item.text("type") or "message"
    match kind:
        case "message":
            return _message(item)
        case "reasoning":
            return ChatTurn(role="assistant", reasoning=_reasoning(item))
        case "function_call":
            name, call_id = item.named("name"), item.text("call_id") or item.text("id")
            call = CallOfTool(call_id, name, take_arguments(item, "arguments"))
            return ChatTurn(role="assistant", calls=(call,))
        case "function_call_output":
            content = plain_text(item.take("output"), item.path("output"))
            return ChatTurn(role="tool", content=content, call_id=item.text("call_id"))
        case "item_reference":
            item.refuse("type", f"is {shown(kind)}: replies are not stored. Send the item itself")
    item.refuse(
        "type", f"is {shown(kind)}: items are messages, reasoning, and calls of functions with outputs"
    )


def _message(item: Fields) -> ChatTurn:
    content = plain_text(item.take("content"), item.path("content"))
    match item.text("role"):
        case "system" | "developer" | "user" | "assistant" as role:
            return ChatTurn(role=role, content=content)
    item.refuse("role", "must be system, developer, user or assistant")


def _reasoning(item: Fields) -> str:
    """What we encrypted, else the content, else the summary."""
    encrypted = item.text("encrypted_content")
    if encrypted.startswith(ENCRYPTED):
        try:
            return base64.b64decode(encrypted.removeprefix(ENCRYPTED), validate=True).decode()
        except ValueError:
            item.refuse("encrypted_content", "was changed: send the item as it came")
    content = plain_text(item.take("content"), item.path("content"))
    return content or plain_text(item.take("summary"), item.path("summary"))


def write_items(call: Call, reply: Reply) -> Iterator[dict[str, Any]]:
    """Reasoning, a message and calls, as far as the reply has them. Without calls there is a message.

    The message has the log-probs of all tokens, also of those of reasoning. A call is whole, also in a reply
    that was cut behind it.
    """
    status = "incomplete" if reply.finish == "length" else "completed"
    if reply.reasoning:
        yield {
            "id": f"rs_{reply.id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reply.reasoning}],
            "encrypted_content": ENCRYPTED + base64.b64encode(reply.reasoning.encode()).decode(),
            "status": status,
        }
    if reply.content or not reply.calls:
        logprobs = token_logprobs(reply, call.top_logprobs) if call.logprobs else []
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": logprobs}
        identity = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        yield {**identity, "status": status, "content": [text]}
    for index, one in enumerate(reply.calls):
        called = {"call_id": one.id, "name": one.name, "arguments": one.arguments}
        yield {"id": f"fc_{reply.id}_{index}", "type": "function_call", "status": "completed", **called}
