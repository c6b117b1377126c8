"""What OpenAI's dialects share: errors, counts of tokens, log-probs."""

from __future__ import annotations

from typing import Any

from millrace.environments.gateway.calls import Reply
from millrace.environments.gateway.dialects.server_sent import event

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
