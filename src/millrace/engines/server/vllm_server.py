"""`vllm serve`: its routes, its settings in its own words, and those that do not fit a run. Names no torch.
vLLM has most of these routes with `VLLM_SERVER_DEV_MODE=1` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError, boundary
from millrace.engines.server.client import ANSWER_S, ERROR_CHARS_MAX, LOAD_S, WORK_S, Client
from millrace.engines.server.server_dialect import Offer, ReadPart, Requirements, Sampled, Token
from millrace.engines.vllm.vllm_arguments import sampling_arguments
from millrace.rollout.continuation import Continuation

GENERATE = "/inference/v1/generate"
ROUTES = {
    GENERATE: "start it with --tokens-only",
    **dict.fromkeys(
        ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/server_info"),
        "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
    ),
}
"""The routes that are needed, and how to start a server with each."""
SUPPORTED = ("0.32",)
"""The tests of engines have passed with the server of these releases."""
NOT_FINITE = -9999.0  # the answer in place of a log-prob that is NaN or infinite


class _Logprobs(msgspec.Struct):
    content: list[Token] | None = None


class _TokenRange(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_TokenRange] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class VllmServer(Client):
    """See `dialect.Dialect`."""

    program, generate = "vLLM", GENERATE

    def __init__(self, url: str, *, seeded: bool = True) -> None:
        super().__init__(url)
        self._seeded = seeded

    # ------------------------------------------------------------ properties

    def check_alive(self) -> None:
        self._ask("GET", "/health", ANSWER_S)

    check_started = check_alive

    def offer(self, requirements: Requirements) -> Offer:
        routes = set(self._answer("paths", "GET", "/openapi.json", WORK_S))
        missing = [f"it has no route {path}: {how}" for path, how in ROUTES.items() if path not in routes]
        if "/server_info" not in routes:
            return Offer("", 0, False, missing)
        params = {"config_format": "json"}
        settings = self._answer("vllm_config", "GET", "/server_info", WORK_S, params=params)
        with boundary(f"server {self.url}", "tells its settings in another form", ConfigError):
            release = str(self._answer("version", "GET", "/version", ANSWER_S))
            if not release.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
                missing.append(f"its vLLM {release} is not supported; supported: {', '.join(SUPPORTED)}")
            missing += unfit(settings, requirements)
            with_head = requirements.tied and unties(settings)
            return Offer(release, capacity(settings), with_head, missing)

    def check_logprobs(self, tokens: Sequence[int]) -> None:
        """Tokens sampled with `top_k` 1 must have log-prob 0."""
        sampling = {"logprobs": 0, "top_k": 1, "temperature": 2.0, "max_tokens": 8}
        choices = self._generate("choices", tokens, sampling)
        with self._understood(GENERATE):
            logprobs = [float(token["logprob"]) for token in choices[0]["logprobs"]["content"]]
        if NOT_FINITE < min(logprobs) < -1e-4:
            raise ConfigError(
                f"`rollout.servers`: log-probs of {self.url} are not of the distribution that it samples "
                f"from: with one token to choose from it tells {logprobs}.\n  Start it with --logprobs-mode "
                "processed_logprobs"
            )

    # ------------------------------------------------------------ weights

    def pause(self) -> None:
        self._ask("POST", "/pause", WORK_S, params={"mode": "abort"})

    def resume(self) -> None:
        self._ask("POST", "/resume", ANSWER_S)

    def load(self, directory: Path, label: str) -> None:
        self._call_workers("update_config", overrides={"load_config": {"load_format": "safetensors"}})
        self._call_workers("reload_weights", weights_path=str(directory))
        self._ask("POST", "/update_weight_version", ANSWER_S, json={"new_version": label})

    def _call_workers(self, method: str, **kwargs: Any) -> None:
        with self._alive_meanwhile(self.check_alive):
            self._ask("POST", "/collective_rpc", LOAD_S, json={"method": method, "kwargs": kwargs})

    # ------------------------------------------------------------ work

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        positions = self._generate("prompt_logprobs", tokens, sampling)
        with self._understood(GENERATE):
            pairs = zip(positions[1:], tokens[1:], strict=True)
            return [float(position[str(token)]["logprob"]) for position, token in pairs]

    def request(self, continuation: Continuation, label: str) -> dict[str, Any]:
        return {
            "token_ids": list(continuation.tokens),
            "sampling_params": sampling_arguments(continuation, seeded=self._seeded),
            "cache_salt": label,
            "stream": True,
        }

    def open_reader(self) -> ReadPart:
        return _read

    def _generate(self, key: str, tokens: Sequence[int], sampling: dict[str, Any]) -> Any:
        params = {"detokenize": False, "ignore_eos": True, **sampling}
        request = {"token_ids": list(tokens), "sampling_params": params}
        return self._answer(key, "POST", GENERATE, WORK_S, json=request)


def _read(data: str) -> Sampled:
    chunk = _DECODER.decode(data)
    if chunk.error is not None:
        raise ValueError(str(chunk.error)[:ERROR_CHARS_MAX])
    if not chunk.choices:
        return Sampled()
    (choice,) = chunk.choices
    tokens = (choice.logprobs and choice.logprobs.content) or []
    for token in tokens:
        token.logprob = token.logprob if token.logprob > NOT_FINITE else math.nan
    labels = [tokens.version for tokens in choice.weight_versions or ()]
    return Sampled(tokens, choice.finish_reason, labels)


# ---------------------------------------------------------------- settings


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
