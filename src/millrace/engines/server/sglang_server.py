"""An SGLang server (`python -m sglang.launch_server`). Names no torch.

Follows the source of SGLang 0.5.23, `srt`: `entrypoints/http_server.py` (routes), `managers/io_struct.py`
(requests), `managers/tokenizer_manager.py` (streams, pause) and `layers/sampler.py` (log-probs, noise).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError, boundary
from millrace.core.types import Sampling
from millrace.engines.server.client import ANSWER_S, ERROR_CHARS_MAX, LOAD_S, WORK_S, Client
from millrace.engines.server.server_dialect import Offer, ReadPart, Requirements, Sampled, Token
from millrace.rollout.continuation import Continuation
from millrace.rollout.noise import Noise

GENERATE = "/generate"
HEALTH_S = 25.0  # SGLang itself waits 20 s for a token
IDLE_S = 30.0  # for the last step of requests whose streams were closed
PROBE = 1e4  # a temperature, and a bias as large: every other logit is nothing beside them
NUMBER_MIN = -1e30  # SGLang gives the lowest float32 in place of minus infinity

Logprob = tuple[float | None, int, str | None]
"""The log-prob, None if it is not finite; the token; its text."""


class _Meta(msgspec.Struct):
    weight_version: str
    output_token_logprobs: list[Logprob] = []
    output_token_logprobs_length: int = 0
    weight_versions: list[dict[str, Any]] = []
    finish_reason: dict[str, Any] | None = None


class _Part(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Part)


class SglangServer(Client):
    """See `dialect.Dialect`."""

    program, generate = "SGLang", GENERATE

    def __init__(self, url: str, *, seeded: bool = True) -> None:
        super().__init__(url)
        self._seeded = seeded

    # ------------------------------------------------------------ properties

    def check_started(self) -> None:
        """A paused server is never healthy, and one that still warms up must not be paused."""
        self.resume()
        self.check_alive()

    def check_alive(self) -> None:
        """SGLang answers when a token comes, of any request or of one that it makes for this."""
        self._ask("GET", "/health", HEALTH_S)

    def _check_answers(self) -> None:
        self._ask("GET", "/model_info", ANSWER_S)

    def offer(self, requirements: Requirements) -> Offer:
        answer = self._ask("GET", "/server_info", WORK_S)
        with self._understood("/server_info"):
            settings = answer.json()
            release = str(settings["version"])
        if release not in SUPPORTED:
            problem = f"its SGLang {release} is not supported; supported: {', '.join(SUPPORTED)}"
            return Offer(release, 0, False, [problem])
        with boundary(f"server {self.url}", "tells its settings in another form", ConfigError):
            capacity = int(settings["max_total_num_tokens"])
            return Offer(release, capacity, False, list(unfit(settings, requirements)))

    def check_logprobs(self, tokens: Sequence[int]) -> None:
        """At a high temperature, with as high a bias for one token, that token is the likeliest and not
        certain. Without the temperature its log-prob is 0."""
        biased = {"temperature": PROBE, "logit_bias": {str(tokens[0]): PROBE}}
        meta = self._generate(tokens, biased, top_logprobs_num=1)
        with self._understood(GENERATE):
            logprob = _number(meta["output_top_logprobs"][0][0][0])
        if logprob > -0.1:
            raise ConfigError(
                f"`rollout.servers`: log-probs of {self.url} are not of the distribution that it samples "
                f"from: they are the same at every temperature ({logprob:.3g} at {PROBE:g}).\n"
                "  Start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
            )

    # ------------------------------------------------------------ weights

    def pause(self) -> None:
        """A request whose stream was closed before may still be in its last step. The cache is emptied after
        that step, and only then can weights be loaded."""
        self._ask("POST", "/pause_generation", WORK_S, json={"mode": "abort"})
        self._ask("POST", "/flush_cache", WORK_S, params={"timeout": IDLE_S})

    def resume(self) -> None:
        self._ask("POST", "/continue_generation", ANSWER_S, json={"torch_empty_cache": False})

    def load(self, directory: Path, label: str) -> None:
        """`/health` fails in a pause, so a load asks another route."""
        request = {"model_path": str(directory), "load_format": "safetensors", "weight_version": label}
        with self._alive_meanwhile(self._check_answers):
            self._ask("POST", "/update_weights_from_disk", LOAD_S, json=request)

    # ------------------------------------------------------------ work

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """SGLang calls the last token of the vocabulary 0 here, so its ids are not looked at."""
        meta = self._generate(tokens, {"temperature": 0.0}, logprob_start_len=0)
        with self._understood(GENERATE):
            rows = zip(meta["input_token_logprobs"][1:], tokens[1:], strict=True)
            return [_number(logprob) for (logprob, _, _), _ in rows]

    def request(self, continuation: Continuation, label: str) -> dict[str, Any]:
        sampling = continuation.work.sampling
        _refuse_dishonest(sampling)
        params = {
            "temperature": sampling.temperature,
            "max_new_tokens": continuation.tokens_left,
            "stop_token_ids": sorted(continuation.stop_ids),
            "ignore_eos": sampling.ignore_eos,  # then SGLang ignores `stop_token_ids` too
        }
        if self._seeded:
            params["sampling_seed"] = _seed(continuation)
        return {
            "input_ids": list(continuation.tokens),
            "sampling_params": params,
            "return_logprob": True,
            "extra_key": label,
            "stream": True,
        }

    def open_reader(self) -> ReadPart:
        return _Reader().read

    def _generate(self, tokens: Sequence[int], params: dict[str, Any], **more: Any) -> Any:
        params = {"max_new_tokens": 1, "ignore_eos": True, **params}
        request = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, **more}
        return self._answer("meta_info", "POST", GENERATE, WORK_S, json=request)


class _Reader:
    """Parts overlap: an abort repeats tokens. Each part says how many tokens there are by its end."""

    def __init__(self) -> None:
        self._read = 0

    def read(self, data: str) -> Sampled:
        part = _DECODER.decode(data)
        meta, finish = part.meta_info, part.meta_info and part.meta_info.finish_reason
        failed = finish if finish and finish.get("status_code") else part.error
        if meta is None or failed:
            raise ValueError(str(failed or f"a part without meta_info: {data}")[:ERROR_CHARS_MAX])
        given, end = meta.output_token_logprobs, meta.output_token_logprobs_length
        repeated = self._read - (end - len(given))
        if repeated < 0:
            raise ValueError(f"its stream leaves out {-repeated} tokens after token {self._read}")
        self._read = max(self._read, end)
        tokens = [Token(token, _number(logprob)) for logprob, token, _ in given[repeated:]]
        labels = [meta.weight_version, *(span["version"] for span in meta.weight_versions)]
        return Sampled(tokens, finish["type"] if finish else None, labels)


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None or logprob < NUMBER_MIN else float(logprob)


def _refuse_dishonest(sampling: Sampling) -> None:
    if sampling.cuts or sampling.edits:
        raise ConfigError(
            "SGLang's log-probs do not follow min-p, top-k and top-p, and its penalties forget the tokens of "
            f"earlier requests: {sampling}\n  Leave these keys of `sampling` at their defaults"
        )


def _seed(continuation: Continuation) -> int:
    """Of the whole trajectory: SGLang's noise is a function of this seed and of the token's position."""
    work = continuation.work
    return int(Noise([work.seed], [work.trajectory_id]).uniforms([0], 1)[0, 0] * 2**52)


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
