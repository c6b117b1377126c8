"""The settings of `vllm serve`, in its own words, and those that do not fit a run. Names no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.engines.server.server_dialect import Requirements


def unfit(settings: dict[str, Any], requirements: Requirements) -> Iterator[str]:
    model, scheduler = settings["model_config"], settings["scheduler_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        yield f"its log-probs are {model['logprobs_mode']}: start it with --logprobs-mode processed_logprobs"
    if model["max_model_len"] < requirements.max_sequence_tokens:
        yield (
            f"it holds sequences of {model['max_model_len']} tokens: start it with --max-model-len "
            f"{requirements.max_sequence_tokens}, or lower `rollout.max_sequence_tokens`"
        )
    if scheduler["max_num_seqs"] <= requirements.slots:
        yield (
            f"it decodes {scheduler['max_num_seqs']} sequences at a time, and one is for the proof of what "
            f"it serves: start it with --max-num-seqs {requirements.slots + 1}, or lower `rollout.slots`"
        )
    if settings.get("speculative_config") is not None:
        yield (
            "it guesses tokens ahead: start it without --speculative-config. On a CPU its log-probs are "
            "wrong then, and on a GPU nobody has looked"
        )
    dtype = str(model["dtype"]).removeprefix("torch.")
    if dtype not in (requirements.dtype, "float32"):
        yield (
            f"it computes in {dtype}, and `model.dtype` is {requirements.dtype}: start it with --dtype "
            f"{requirements.dtype}"
        )
    if _device(settings) == "cpu":
        yield from _unfit_cpu(settings, requirements)


def _unfit_cpu(settings: dict[str, Any], requirements: Requirements) -> Iterator[str]:
    if requirements.tied and not unties(settings):
        yield (
            "on a CPU vLLM does not renew a head that is tied to the embedding: start it with --load-format "
            """dummy --hf-overrides '{"tie_word_embeddings": false}'"""
        )
    if settings["scheduler_config"]["enable_chunked_prefill"]:
        yield (
            "on a CPU vLLM fails on a prompt in parts: start it with --no-enable-chunked-prefill and "
            "--max-num-batched-tokens of at least --max-model-len"
        )


def _device(settings: dict[str, Any]) -> str:
    return str(settings["device_config"]["device"])


def unties(settings: dict[str, Any]) -> bool:
    overrides = settings["model_config"]["hf_overrides"]
    return isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False


def capacity(settings: dict[str, Any]) -> int:
    """Of keys and values, in tokens."""
    cache = settings["cache_config"]
    return int(cache["num_gpu_blocks"] or 0) * int(cache["block_size"])
