"""vLLM's route for token ids in and token ids out: `/inference/v1/generate`.

The form is that of vLLM's `GenerateRequest`, `GenerateResponse` and `GenerateStreamResponse`. A client that
renders prompts itself, such as the package `renderers`, is answered with the ids that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.episodes.gateway.calls import Call, Reply
from millrace.episodes.gateway.dialects.fields import (
    CONSTRAINS,
    CONSTRAINTS,
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
    token_counts,
)
from millrace.episodes.gateway.dialects.text import is_token_ids


class GenerateDialect(OpenAIErrors):
    def read(self, body: bytes) -> Call:
        fields = decode(body)
        call = Call(model=fields.text("model"))
        fields.refuse_given(("features", "content_parts"), "has images or sounds: the model reads text alone")
        call.prompt = fields.take("token_ids")
        if not is_token_ids(call.prompt):
            fields.refuse("token_ids", "must be a list of token ids that is not empty")
        sampling = fields.inner("sampling_params")
        sampling.refuse_given(CONSTRAINTS, CONSTRAINS)
        refuse_more_than_one(sampling, "n", "best_of")
        call.max_tokens = sampling.integer("max_tokens", 1)
        call.stop = sampling.strings("stop")
        call.stop_ids = sampling.take("stop_token_ids") or []
        if call.stop_ids and not is_token_ids(call.stop_ids):
            sampling.refuse("stop_token_ids", "must be a list of token ids")
        alternatives = take_alternatives(sampling, "logprobs")
        call.logprobs, call.top_logprobs = alternatives is not None, alternatives or 0
        call.stream = fields.flag("stream")
        call.usage = fields.inner("stream_options").flag("include_usage")
        call.token_ids = fields.flag("return_token_ids")
        call.unheeded |= {**fields.rest, **({"sampling_params": sampling.rest} if sampling.rest else {})}
        return call

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        choice = {**_choice(call, reply, 0, None), "finish_reason": _finish(reply)}
        ids = {"prompt_token_ids": reply.prompt_ids} if call.token_ids else {}
        identity = {"request_id": reply.id, "model": reply.model, "created": reply.created}
        return {**identity, "choices": [choice], "usage": token_counts(reply), **ids}

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        starts = range(0, max(len(reply.ids), 1), DELTA_TOKENS)
        for start in starts:
            finish = _finish(reply) if start == starts[-1] else None
            choice = {**_choice(call, reply, start, start + DELTA_TOKENS), "finish_reason": finish}
            yield event({"request_id": reply.id, "choices": [choice]})
        if call.usage:
            yield event({"request_id": reply.id, "choices": [], "usage": token_counts(reply)})
        yield DONE


def _finish(reply: Reply) -> str:
    return "length" if reply.finish == "length" else "stop"


def _choice(call: Call, reply: Reply, start: int, end: int | None) -> dict[str, Any]:
    """The tokens from `start` to before `end`. As in vLLM, each `top_logprobs` has the sampled token."""
    ids = reply.ids[start:end]
    content = []
    for token_id, logprob in zip(ids, reply.logprobs[start:end], strict=True) if call.logprobs else ():
        entry = {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}
        content.append({**entry, "top_logprobs": [entry]})
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content} if call.logprobs else None}
