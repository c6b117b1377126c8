"""OpenAI's Responses: `/v1/responses`. Nothing is stored: each request has the whole conversation."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

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
    OpenAIErrors,
    event,
    openai_error,
    plain_text,
    slices,
    take_tools,
    token_logprobs,
)

ENCRYPTED = "millrace."
"""Begins the `encrypted_content` of reasoning: behind it is the text in base64, which is no secret here."""


def read_items(items: list[Fields]) -> list[ChatTurn]:
    """The turns, in order. Items of the assistant that follow each other are one turn.

    A reply has its reasoning first. So reasoning after a message or a call begins a turn of its own.
    """
    turns: list[ChatTurn] = []
    for item in items:
        part = _turn_of_item(item)
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


def _turn_of_item(item: Fields) -> ChatTurn:
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


STORED = ("previous_response_id", "conversation", "background", "prompt")
LOGPROBS = "message.output_text.logprobs"


class ResponsesDialect(OpenAIErrors):
    def read(self, body: bytes) -> Call:
        fields = decode(body)
        call = Call(model=fields.text("model"))
        fields.refuse_given(STORED, "needs what was stored, and nothing is: send the whole conversation")
        fields.refuse_given(CONSTRAINTS, CONSTRAINS)
        refuse_more_than_one(fields, "n")
        text = fields.inner("text")
        if text.inner("format").text("type") not in ("", "text"):
            text.refuse("format", CONSTRAINS)
        call.messages = _conversation(fields)
        take_tools(fields, call, schema="parameters")
        call.max_tokens = fields.integer("max_output_tokens", 1)
        call.stop = fields.strings("stop")
        call.stream = fields.flag("stream")
        call.top_logprobs = take_alternatives(fields, "top_logprobs") or 0
        include = fields.strings("include")
        call.logprobs = LOGPROBS in include
        if others := [one for one in include if one != LOGPROBS]:
            call.unheeded["include"] = others
        call.unheeded |= {**fields.rest, **({"text": text.rest} if text.rest else {})}
        return call

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        """`reasoning_tokens` is 0: the tokens of reasoning are not counted apart."""
        status = "incomplete" if reply.finish == "length" else "completed"
        num_prompt, num_sampled = len(reply.prompt_ids), len(reply.ids)
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        }
        return {**_head(call, reply, status), "output": list(write_items(call, reply)), "usage": usage}

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        begun = {**_head(call, reply, "in_progress"), "output": [], "usage": None}
        return response_events(begun, self.reply(call, reply))

    def error_event(self, status: int, message: str, field: str | None = None) -> bytes:
        """The event has the number 0, because nothing is streamed before a reply is whole. OpenAI's SDK
        raises an event with the field `error`, and hands on another, after which the stream just ends."""
        error = openai_error(status, message, field)["error"]
        told = {"code": error["type"], "message": message, "param": field, "error": error}
        return event({"type": "error", "sequence_number": 0, **told}, "error")


def _conversation(fields: Fields) -> list[ChatTurn]:
    instructions = fields.text("instructions")
    system = [ChatTurn(role="system", content=instructions)] if instructions else []
    if isinstance(fields.rest.get("input"), str):
        return [*system, ChatTurn(role="user", content=fields.text("input"))]
    items = fields.objects("input")
    if not items:
        fields.refuse("input", "has no item: give a text, or a list of items")
    return [*system, *read_items(items)]


def _head(call: Call, reply: Reply, status: str) -> dict[str, Any]:
    """A response without its output and counts."""
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "max_output_tokens": call.max_tokens,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools],
        "top_p": None,
        "truncation": "disabled",
    }


Event = tuple[str, dict[str, Any]]
"""Its type, and its other fields but the number."""


def response_events(begun: dict[str, Any], response: dict[str, Any]) -> Iterator[bytes]:
    """`begun`: the response before its first item. The last event is `response.completed` or
    `response.incomplete`, after the status of `response`."""
    for number, (kind, fields) in enumerate(_all(begun, response)):
        yield event({"type": kind, "sequence_number": number, **fields}, kind)


def _all(begun: dict[str, Any], response: dict[str, Any]) -> Iterator[Event]:
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield from _arguments(item, place)
        else:
            yield from _part(item["content"][0], {**place, "content_index": 0})
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """The item before its content came."""
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        return {**begun, "arguments": ""}
    return {**begun, "content": [], **({"encrypted_content": None} if item["type"] == "reasoning" else {})}


def _arguments(item: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    for delta in slices(item["arguments"]):
        yield "response.function_call_arguments.delta", {**place, "delta": delta}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", {**place, **done}


def _part(part: dict[str, Any], place: dict[str, Any]) -> Iterator[Event]:
    """Text, or the text of reasoning. The log-probs come with the last event of the text."""
    kind = part["type"]
    of_text = kind == "output_text"
    yield "response.content_part.added", {**place, "part": {**part, "text": "", **_logprobs(of_text, [])}}
    for delta in slices(part["text"]):
        yield f"response.{kind}.delta", {**place, "delta": delta, **_logprobs(of_text, [])}
    done = {"text": part["text"], **_logprobs(of_text, part.get("logprobs"))}
    yield f"response.{kind}.done", {**place, **done}
    yield "response.content_part.done", {**place, "part": part}


def _logprobs(of_text: bool, logprobs: list[Any] | None) -> dict[str, Any]:
    return {"logprobs": logprobs} if of_text else {}
