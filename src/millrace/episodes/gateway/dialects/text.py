"""OpenAI's completions of a text or of token ids, with vLLM's fields for ids: `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from millrace.episodes.gateway.calls import Call, Reply
from millrace.episodes.gateway.dialects.fields import (
    CONSTRAINS,
    CONSTRAINTS,
    Fields,
    decode,
    refuse_more_than_one,
    take_alternatives,
)
from millrace.episodes.gateway.dialects.shapes import (
    DELTA_TOKENS,
    DONE,
    OpenAIErrors,
    event,
    finite,
    slices,
    token_counts,
)


class TextDialect(OpenAIErrors):
    """The reply is the whole text of the sampled tokens: reasoning and calls stay in the text."""

    def read(self, body: bytes) -> Call:
        fields = decode(body)
        call = Call(model=fields.text("model"))
        fields.refuse_given(CONSTRAINTS, CONSTRAINS)
        fields.refuse_given(("echo", "suffix", "prompt_embeds"), "is not possible: a turn follows a prompt")
        refuse_more_than_one(fields, "n", "best_of")
        if fields.inner("response_format").text("type") not in ("", "text"):
            fields.refuse("response_format", CONSTRAINS)
        call.prompt = _prompt(fields)
        call.max_tokens = fields.integer("max_tokens", 1)
        call.stop = fields.strings("stop")
        call.stream = fields.flag("stream")
        call.usage = fields.inner("stream_options").flag("include_usage")
        alternatives = take_alternatives(fields, "logprobs")
        call.logprobs, call.top_logprobs = alternatives is not None, alternatives or 0
        call.token_ids = fields.flag("return_token_ids")
        call.unheeded |= fields.rest
        return call

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        choice = {"index": 0, "text": reply.text, "finish_reason": _finish(reply), "logprobs": None}
        choice |= {**_ids(call, reply), **_logprobs(call, reply, 0, None)}
        return {**_head(reply), "choices": [choice], "usage": token_counts(reply)}

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        head = _head(reply)

        def chunk(text: str, finish: str | None = None, **rest: Any) -> bytes:
            choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None, **rest}
            return event({**head, "choices": [choice]})

        if call.token_ids:
            yield chunk("", **_ids(call, reply))
        for part in slices(reply.text):
            yield chunk(part)
        for start in range(0, len(reply.ids) if call.logprobs else 0, DELTA_TOKENS):
            yield chunk("", **_logprobs(call, reply, start, start + DELTA_TOKENS))
        yield chunk("", _finish(reply))
        if call.usage:
            yield event({**head, "choices": [], "usage": token_counts(reply)})
        yield DONE


def _prompt(fields: Fields) -> str | list[int]:
    """A text, a list of token ids, or a list with one of these."""
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            fields.refuse("prompt", "has several prompts: ask for one turn at a time")
        prompt = prompt[0]
    if isinstance(prompt, str) or is_token_ids(prompt):
        return prompt
    fields.refuse("prompt", "must be a text, or a list of token ids that is not empty")


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _finish(reply: Reply) -> str:
    return "length" if reply.finish == "length" else "stop"


def _head(reply: Reply) -> dict[str, Any]:
    identity = {"id": f"cmpl-{reply.id}", "object": "text_completion"}
    return {**identity, "created": reply.created, "model": reply.model}


def _ids(call: Call, reply: Reply) -> dict[str, Any]:
    """Both in the choice, as vLLM has them here."""
    return {"token_ids": reply.ids, "prompt_token_ids": reply.prompt_ids} if call.token_ids else {}


def _logprobs(call: Call, reply: Reply, start: int, end: int | None) -> dict[str, Any]:
    """Of the tokens from `start` to before `end`, if they are asked for."""
    if not call.logprobs:
        return {}
    pieces, logprobs = reply.pieces[start:end], [finite(one) for one in reply.logprobs[start:end]]
    before = sum(map(len, reply.pieces[:start]))
    tops = [{piece: one} for piece, one in zip(pieces, logprobs, strict=True)]
    of_tokens = {
        "tokens": pieces,
        "token_logprobs": logprobs,
        "top_logprobs": tops if call.top_logprobs else None,
        "text_offset": list(accumulate(map(len, pieces), initial=before))[:-1],
    }
    return {"logprobs": of_tokens}
