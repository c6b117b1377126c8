"""Arguments of vLLM's `SamplingParams`, for calls in its process or over HTTP. Names no vLLM."""

from __future__ import annotations

from typing import Any

from millrace.rollout.continuation import Continuation
from millrace.rollout.noise import Noise

# Fields of `Sampling` that mean the same to vLLM. vLLM counts presence and frequency from the start of a
# request, and can ban only strings.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_arguments(continuation: Continuation, *, seeded: bool = True) -> dict[str, Any]:
    """The arguments for the rest of `continuation`: tokens with their log-probs, and no text. Not `seeded`:
    all requests share vLLM's own noise."""
    sampling = continuation.work.sampling
    allowed = sampling.allowed_token_ids
    return {
        **{name: getattr(sampling, name) for name in _SAME},
        "allowed_token_ids": None if allowed is None else list(allowed),
        "seed": _seed(continuation) if seeded else None,
        "max_tokens": continuation.tokens_left,
        "stop_token_ids": sorted(continuation.stop_ids),
        "ignore_eos": True,  # `stop_ids` has the model's end tokens
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


def _seed(continuation: Continuation) -> int:
    """The seed of the next tokens. After a move, noise that was used before must not come again."""
    work = continuation.work
    uniform = Noise([work.seed], [work.trajectory_id]).uniforms([len(continuation.tokens)], 1)[0, 0]
    return int(uniform * 2**52)
