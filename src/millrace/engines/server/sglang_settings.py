"""The settings of an SGLang server, in its own words, and those that do not fit a run. Names no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.engines.server.dialect import Requirements

SUPPORTED = ("0.5.23",)
"""Releases whose source `sglang_server` follows."""
CONTEXT_SPARE = 6  # tokens that SGLang keeps back from its context length


def unfit(settings: dict[str, Any], requirements: Requirements) -> Iterator[str]:
    if settings["dtype"] not in (requirements.dtype, "float32"):
        yield (
            f"it computes in {settings['dtype']}, and `model.dtype` is {requirements.dtype}: start it with "
            f"--dtype {requirements.dtype}"
        )
    if settings["max_req_input_len"] < requirements.max_sequence_tokens:
        yield (
            f"it takes prompts of {settings['max_req_input_len']} tokens: start it with --context-length "
            f"{requirements.max_sequence_tokens + CONTEXT_SPARE} and with memory for as many, or lower "
            "`rollout.max_sequence_tokens`"
        )
    decodes = settings["internal_states"][0]["effective_max_running_requests_per_dp"]
    if decodes <= requirements.slots:
        yield (
            f"it decodes {decodes} sequences at a time, and one is for the proof of what it serves: start it "
            f"with --max-running-requests {requirements.slots + 1}, or lower `rollout.slots`"
        )
    if not settings["incremental_streaming_output"]:
        yield (
            "it sends all tokens of a request again with each new one: start it with "
            "--incremental-streaming-output"
        )
    if requirements.seeded and not settings["enable_deterministic_inference"]:
        yield (
            "it ignores seeds: start it with --enable-deterministic-inference, or set `rollout.seeded` to "
            "false: then no run repeats"
        )
    if settings["speculative_algorithm"] is not None:
        yield (
            f"it guesses tokens ahead ({settings['speculative_algorithm']}): start it without "
            "--speculative-algorithm, as nobody has looked whether its log-probs are right then"
        )
