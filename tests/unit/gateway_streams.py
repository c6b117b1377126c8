"""What a client makes of the streams of a gateway: each adds up to the JSON of the whole reply."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def parse(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """The data of each event. The names of events are those of the data, and `[DONE]` is the last."""
    found = []
    for text in b"".join(events).decode().split("\n\n")[:-1]:
        *name, data = text.split("\n")
        assert data.startswith("data: ")
        if data == "data: [DONE]":
            found.append({})
            continue
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
    assert all(found[:-1])
    return found


def of_chat(events: Iterable[bytes]) -> dict[str, Any]:
    """The reply without its finish: the message, the reason of its end, and what stands beside."""
    *chunks, done = parse(events)
    assert done == {}
    message: dict[str, Any] = {"role": "", "content": "", "tool_calls": []}
    rest: dict[str, Any] = {"logprobs": []}
    for chunk in chunks:
        rest |= {name: chunk[name] for name in ("usage", "prompt_token_ids") if chunk.get(name)}
        for choice in chunk["choices"]:
            rest["logprobs"] += (choice.get("logprobs") or {"content": []})["content"]
            rest |= {name: choice[name] for name in ("token_ids", "finish_reason") if choice.get(name)}
            _add(message, choice["delta"])
    return {"message": message, **rest}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for call in delta.pop("tool_calls", ()):
        if call.pop("index") == len(message["tool_calls"]):
            message["tool_calls"].append(call)
        else:
            message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    for name, part in delta.items():
        message[name] = message.get(name, "") + part


def of_responses(events: Iterable[bytes]) -> dict[str, Any]:
    """The response, whose items the events before it have made too."""
    found = parse(events)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for one in found:
        match one["type"].removeprefix("response."):
            case "output_item.added":
                assert one["output_index"] == len(items)
                items.append(one["item"])
                texts.append("")
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert one["item_id"] == items[-1]["id"]
                texts[-1] += one["delta"]
            case "output_item.done":
                assert one["item"]["id"] == items[-1]["id"]
                items[-1] = one["item"]
    assert texts == [item.get("arguments") or item.get("content", [{}])[0].get("text", "") for item in items]
    assert items == found[-1]["response"]["output"]
    return found[-1]["response"]


def of_messages(events: Iterable[bytes]) -> dict[str, Any]:
    """The message."""
    first, *found = parse(events)
    message = first["message"]
    arguments = ""
    for one in found:
        match one["type"]:
            case "content_block_start":
                assert one["index"] == len(message["content"])
                message["content"].append(one["content_block"])
                arguments = ""
            case "content_block_delta" if one["delta"]["type"] == "input_json_delta":
                arguments += one["delta"]["partial_json"]
                message["content"][-1]["input"] = None
            case "content_block_delta":
                name = one["delta"].pop("type").removesuffix("_delta")
                message["content"][-1][name] += one["delta"][name]
            case "content_block_stop" if arguments:
                message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= {**one["delta"], "usage": one["usage"]}
    assert found[-1] == {"type": "message_stop"}
    return message
