"""The offer of a running server, and what a run misses there. Names no torch. The probe looks at

routes      of `client.ROUTES`
settings    in vLLM's own words
behaviour   whether the log-prob of a token is of the distribution that the token was sampled from
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from millrace.core.errors import ConfigError, WorkerError, boundary
from millrace.engines.server.client import NOT_FINITE, ROUTES, Server

SUPPORTED = ("0.32",)
"""The tests of engines have passed with the server of these releases."""
DOCUMENTED = "docs/engine.md has the whole command line"
PAUSE_BETWEEN_S = 0.5


class Requirements(NamedTuple):
    """A run's requirements of each server. `dtype`: of published weights. `tied`: the model's head is its
    embedding."""

    slots: int
    max_sequence_tokens: int
    dtype: str
    tied: bool


class Offer(NamedTuple):
    """`with_head`: the server has a head of its own, although the model's head is tied."""

    release: str
    kv_capacity_tokens: int
    with_head: bool


def wait_for(server: Server, wait_s: float) -> None:
    """Wait until `server` answers. Raises: WorkerError: the server does not answer within `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return server.check_alive()
        except WorkerError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(PAUSE_BETWEEN_S)


def probe(server: Server, requirements: Requirements) -> Offer:
    """The server's offer. Raises: ConfigError, which names everything that is missing; WorkerError: the
    server does not answer."""
    routes = server.routes()
    missing = [f"it has no route {path}: {how}" for path, how in ROUTES.items() if path not in routes]
    if "/server_info" in routes:
        settings = server.settings()
        with boundary(f"server {server.url}", "tells its settings in another form", ConfigError):
            release = server.release()
            if not release.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
                missing.append(f"its vLLM {release} is not supported; supported: {', '.join(SUPPORTED)}")
            missing += _unfit(settings, requirements)
            offer = _offer(release, settings, requirements)
    if missing:
        raise ConfigError(
            f"`rollout.servers`: {server.url} cannot serve this run:\n  "
            + "\n  ".join(missing)
            + f"\n  {DOCUMENTED}"
        )
    return offer


def _unfit(settings: dict[str, Any], requirements: Requirements) -> Iterator[str]:
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
    dtype = str(model["dtype"]).removeprefix("torch.")
    if dtype not in (requirements.dtype, "float32"):
        yield (
            f"it computes in {dtype}, and `model.dtype` is {requirements.dtype}: start it with --dtype "
            f"{requirements.dtype}"
        )
    if _device(settings) == "cpu":
        yield from _unfit_cpu(settings, requirements)


def _unfit_cpu(settings: dict[str, Any], requirements: Requirements) -> Iterator[str]:
    if requirements.tied and not _unties(settings):
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


def _unties(settings: dict[str, Any]) -> bool:
    overrides = settings["model_config"]["hf_overrides"]
    return isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False


def _offer(release: str, settings: dict[str, Any], requirements: Requirements) -> Offer:
    cache = settings["cache_config"]
    capacity = int(cache["num_gpu_blocks"] or 0) * int(cache["block_size"])
    return Offer(release, capacity, with_head=requirements.tied and _unties(settings))


def check_logprobs(server: Server, tokens: Sequence[int]) -> None:
    """Check that tokens sampled with `top_k` 1 have log-prob 0. Weights of an earlier run that give no
    numbers pass. Raises: ConfigError: the server's log-probs are the model's own, without `top_k`."""
    logprobs = server.sampled_logprobs(tokens, top_k=1, temperature=2.0, max_tokens=8)
    if NOT_FINITE < min(logprobs) < -1e-4:
        raise ConfigError(
            f"`rollout.servers`: log-probs of {server.url} are not of the distribution that it samples from: "
            f"with one token to choose from it tells {logprobs}.\n  Start it with --logprobs-mode "
            "processed_logprobs"
        )
