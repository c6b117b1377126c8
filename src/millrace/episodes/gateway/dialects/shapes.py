"""What OpenAI's dialects share: errors, counts of tokens, log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.episodes.gateway.calls import Call, RefusedCall, Reply
from millrace.episodes.gateway.dialects.fields import Fields, shown

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
LOGPROB_MIN = -9999.0
"""JSON has no infinity: vLLM writes this number too."""


def openai_error(status: int, message: str, field: str | None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": str(status)}}


class OpenAIErrors:
    """Errors of a `GatewayDialect` of OpenAI."""

    def error(self, status: int, message: str, field: str | None = None) -> dict[str, Any]:
        return openai_error(status, message, field)

    def error_event(self, status: int, message: str, field: str | None = None) -> bytes:
        return event(openai_error(status, message, field))


def token_counts(reply: Reply) -> dict[str, Any]:
    num_prompt, num_sampled = len(reply.prompt_ids), len(reply.ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def finite(logprob: float) -> float:
    return logprob if logprob >= LOGPROB_MIN else LOGPROB_MIN  # NaN is not larger than any number


def token_logprobs(reply: Reply, top_logprobs: int, start: int = 0, end: int | None = None) -> list[Any]:
    """An entry for each sampled token, also for those of reasoning and calls. `top_logprobs`: 0 or 1."""
    entries = []
    for piece, logprob in zip(reply.pieces[start:end], reply.logprobs[start:end], strict=True):
        # A token may be a part of a character. Its bytes are then unknown.
        octets = None if "\ufffd" in piece else list(piece.encode())
        entry = {"token": piece, "logprob": finite(logprob), "bytes": octets}
        entries.append({**entry, "top_logprobs": [entry] * top_logprobs})
    return entries


TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""The types of parts that are text, each with the field that has it."""


def plain_text(content: Any, where: str) -> str:
    """A text, or the parts of text joined with nothing between. Empty if there is no content.

    Raises: RefusedCall: a part is an image, a sound, a file, or something else that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedCall(f"`{where}` is no text, and no list of parts", field=where)
    return "".join(part_text(part, f"{where}[{n}]") for n, part in enumerate(content))


def part_text(part: Any, where: str) -> str:
    """Raises: RefusedCall: the part is no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RefusedCall(f"`{where}` is no part: a part is {{type, text}}", field=where)
    kind = part.get("type") or "text"
    if not isinstance(kind, str) or kind not in TEXTS:
        raise RefusedCall(f"`{where}` is of type {shown(kind)}: the model reads text alone", field=where)
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise RefusedCall(f"`{where}.{TEXTS[kind]}` is no text", field=f"{where}.{TEXTS[kind]}")
    return text


FORCED = "forces a call, which needs constrained sampling: the turn would not come from the policy"
WANTED = ("required", "any")
"""Choices that want a call of any tool, in OpenAI's word and Anthropic's. Agents ask again where none is."""


def take_tools(
    fields: Fields, call: Call, *, schema: str, kind: str = "function", nested: bool = False
) -> None:
    """Put `tools` into the call, with the `tool_choice` "none" no tools. One of `WANTED` changes nothing.

    Args:
        schema: the field that has the JSON Schema of the arguments.
        kind: the type of a tool that the agent runs. A tool without a type is of this type.
        nested: whether the rest of a tool is in its field `function`.
    Raises: RefusedCall: a tool is of another type, or the choice forces a call of one tool.
    """
    tools = []
    for tool in fields.objects("tools"):
        if (found := tool.take("type")) not in (None, kind):
            tool.refuse(
                "type", f"is {shown(found)}: only {kind!r} is possible, a tool that the agent runs itself"
            )
        tools.append(_tool(tool.inner("function") if nested else tool, call, schema))
    choice = fields.take("tool_choice")
    if isinstance(choice, dict):  # Anthropic's form
        rest = {name: value for name, value in choice.items() if name != "type"}
        choice = choice.get("type")
        call.unheeded |= {"tool_choice": rest} if rest else {}
    if isinstance(choice, str) and choice in WANTED:
        call.unheeded["tool_choice"] = choice
    elif choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", f'{FORCED}. Give "auto" or "none"')
    call.tools = [] if choice == "none" else tools


def _tool(function: Fields, call: Call, schema: str) -> dict[str, Any]:
    name, description = function.named("name"), function.text("description")
    parameters = function.take(schema) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        function.refuse(schema, "is no object: it must be a JSON Schema")
    if function.take("strict"):
        call.unheeded.setdefault("strict", []).append(name)
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client skips."""

DELTA_CHARACTERS = 2_000
DELTA_TOKENS = 128
"""Clients that read lines may refuse a line of more than 64 KiB."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + msgspec.json.encode(data) + b"\n\n"


def slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), DELTA_CHARACTERS):
        yield text[start : start + DELTA_CHARACTERS]
