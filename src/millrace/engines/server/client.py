"""The routes of `vllm serve` that an engine needs, one method each, each with a deadline. Names no torch.

vLLM has most of these routes with `VLLM_SERVER_DEV_MODE=1` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2

from millrace.core.errors import WorkerError, boundary
from millrace.core.progress import current

GENERATE = "/inference/v1/generate"
ROUTES = {
    GENERATE: "start it with --tokens-only",
    **dict.fromkeys(
        ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/server_info"),
        "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
    ),
}
"""The routes that are needed, and how to start a server with each."""

ANSWER_S = 20.0  # for an answer that the server only looks up
WORK_S = 60.0  # for an answer that the server computes, or that waits for the end of a step
LOAD_S = 600.0  # for a load, while the server answers that it lives
LOOK_S = 5.0  # between two looks whether it lives
ERROR_CHARS_MAX = 500  # characters of an error's text
NOT_FINITE = -9999.0  # vLLM's answer in place of a log-prob that is NaN or infinite


class Server:
    """A client of one server. Every method raises WorkerError, which names the server, if the answer is late
    or an error, or if there is no answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.Client(base_url=self.url, trust_env=False)

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------ properties

    def check_alive(self) -> None:
        self._ask("GET", "/health", ANSWER_S)

    def routes(self) -> set[str]:
        return set(self._answer("paths", "GET", "/openapi.json", WORK_S))

    def release(self) -> str:
        """The release of vLLM, such as 0.32.0."""
        return str(self._answer("version", "GET", "/version", ANSWER_S))

    def settings(self) -> dict[str, Any]:
        """vLLM's whole configuration."""
        params = {"config_format": "json"}
        settings: dict[str, Any] = self._answer("vllm_config", "GET", "/server_info", WORK_S, params=params)
        return settings

    # ------------------------------------------------------------ weights

    def pause(self) -> None:
        """Every request ends with its tokens so far; new requests wait. The caches are empty."""
        self._ask("POST", "/pause", WORK_S, params={"mode": "abort"})

    def resume(self) -> None:
        self._ask("POST", "/resume", ANSWER_S)

    def load(self, directory: Path, label: str) -> None:
        """Load weights from the safetensors files in `directory`. From then on vLLM calls them `label`."""
        self._call_workers("update_config", overrides={"load_config": {"load_format": "safetensors"}})
        self._call_workers("reload_weights", weights_path=str(directory))
        self._ask("POST", "/update_weight_version", ANSWER_S, json={"new_version": label})

    def _call_workers(self, method: str, **kwargs: Any) -> None:
        with self._alive_meanwhile():
            self._ask("POST", "/collective_rpc", LOAD_S, json={"method": method, "kwargs": kwargs})

    @contextmanager
    def _alive_meanwhile(self) -> Iterator[None]:
        """While the server loads, the call of this replica counts each answer of the server that it lives."""
        ended, call = Event(), current()

        def look() -> None:
            while not ended.wait(LOOK_S):
                with suppress(WorkerError):
                    self.check_alive()
                    call.count()

        looking = Thread(target=look, name="server lives", daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()

    # ------------------------------------------------------------ single answers

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        positions = self._generate("prompt_logprobs", tokens, sampling)
        with self._understood(GENERATE):
            pairs = zip(positions[1:], tokens[1:], strict=True)
            return [float(position[str(token)]["logprob"]) for position, token in pairs]

    def sampled_logprobs(self, tokens: Sequence[int], **sampling: Any) -> list[float]:
        """Log-probs of the tokens that are sampled after `tokens`."""
        choices = self._generate("choices", tokens, {"logprobs": 0, **sampling})
        with self._understood(GENERATE):
            return [float(token["logprob"]) for token in choices[0]["logprobs"]["content"]]

    def _generate(self, key: str, tokens: Sequence[int], sampling: dict[str, Any]) -> Any:
        params = {"detokenize": False, "ignore_eos": True, **sampling}
        request = {"token_ids": list(tokens), "sampling_params": params}
        return self._answer(key, "POST", GENERATE, WORK_S, json=request)

    def _answer(self, key: str, method: str, path: str, timeout_s: float, **arguments: Any) -> Any:
        """The value under `key` of an answer in JSON."""
        answer = self._ask(method, path, timeout_s, **arguments)
        with self._understood(path):
            return answer.json()[key]

    def _understood(self, path: str) -> AbstractContextManager[None]:
        return boundary(f"server {self.url}", f"{path} does not answer as vLLM does", WorkerError)

    def _ask(self, method: str, path: str, timeout_s: float, **arguments: Any) -> httpx2.Response:
        call = f"server {self.url}: {method} {path}"
        try:
            answer = self._client.request(method, path, timeout=timeout_s, **arguments)
        except httpx2.TimeoutException as error:
            raise WorkerError(f"{call}: no answer within {timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise WorkerError(f"{call}: {type(error).__name__}: {error}") from error
        if answer.is_error:
            raise WorkerError(f"{call}: {answer.status_code}: {answer.text[:ERROR_CHARS_MAX]}")
        return answer
