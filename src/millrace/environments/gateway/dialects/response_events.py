"""A whole response as the events of OpenAI's Responses, numbered from 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.environments.gateway.dialects.server_sent import event, slices

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
