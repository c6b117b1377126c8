"""A double of `vllm serve`: its routes over HTTP. See `fake_server`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fake_server import FakeServer, Faulty

from http_double import JsonHandler, serving
from millrace.engines.server.vllm_server import GENERATE, ROUTES


def settings() -> dict[str, Any]:
    """Of a server that lacks nothing, as far as anybody looks."""
    return {
        "model_config": {
            "logprobs_mode": "processed_logprobs",
            "max_model_len": 64,
            "dtype": "torch.float32",
            "hf_overrides": {"tie_word_embeddings": False},
        },
        "scheduler_config": {"max_num_seqs": 9, "enable_chunked_prefill": False},
        "device_config": {"device": "cpu"},
        "cache_config": {"num_gpu_blocks": 10, "block_size": 16},
    }


@dataclass
class FakeVllm(FakeServer):
    generate = GENERATE
    loading = ("/pause", "/collective_rpc", "/update_weight_version", "/resume")

    settings: dict[str, Any] = field(default_factory=settings)
    release: str = "0.32.0"
    routes: set[str] = field(default_factory=lambda: {*ROUTES, "/health"})


class _Vllm(JsonHandler):
    fake: FakeVllm

    def take(self, path: str, given: dict[str, Any]) -> None:
        if path == GENERATE and given.get("stream"):
            self._stream(given)
            return
        answer = self._looked_up(path) or self._done(path, given)
        self.answer(answer, 404 if answer is None else 200)

    def _looked_up(self, path: str) -> Any:
        fake = self.fake
        return {
            "/health": {"alive": True},
            "/openapi.json": {"paths": {path: {} for path in fake.routes}},
            "/version": {"version": fake.release},
            "/server_info": {"vllm_config": fake.settings},
        }.get(path)

    def _done(self, path: str, given: dict[str, Any]) -> Any:
        fake = self.fake
        if path == "/pause":
            fake.pause()
        elif path == "/resume":
            fake.resume()
        elif path == "/update_weight_version":
            fake.set(label=given["new_version"])
        elif path == "/collective_rpc":
            if given["method"] == "reload_weights":
                fake.load(given["kwargs"]["weights_path"])
        elif path == GENERATE:
            return self._generated(given)
        else:
            return None
        return {"path": path}

    def _generated(self, given: dict[str, Any]) -> Any:
        tokens, params = given["token_ids"], given["sampling_params"]
        logprob = 0.0 if "top_k" in params and self.fake.processed else -self.fake.number
        content = [{"token_id": 1, "logprob": logprob}] * params["max_tokens"]
        prompt_logprobs = [None, *({str(token): {"logprob": -self.fake.number}} for token in tokens[1:])]
        return {"prompt_logprobs": prompt_logprobs, "choices": [{"logprobs": {"content": content}}]}

    def _stream(self, given: dict[str, Any]) -> None:
        fake, params = self.fake, given["sampling_params"]
        self.ended = False
        try:
            self.stream(self._said(len(given["token_ids"]), params["max_tokens"], params["stop_token_ids"]))
            if self.ended:
                self.end_stream(done=True)
            else:
                self.broken()
        except OSError:
            self.close_connection = True
            fake.set(left=fake.left + 1)

    def _said(self, *sampling: Any) -> Iterator[Any]:
        sent = 0
        for tokens, reason in self.fake.parts(*sampling):
            sent, self.ended = sent + len(tokens), reason is not None
            content = [{"token_id": token, "logprob": logprob} for token, logprob in tokens]
            spans = [{"version": self.fake.label, "start": 0, "end": sent}] if reason else None
            choice = {"logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
            yield {"choices": [choice]}


class _Handler(Faulty, _Vllm):
    pass


@contextlib.contextmanager
def fake_vllm(**fields: Any) -> Iterator[FakeVllm]:
    fake = FakeVllm(**fields)
    with serving(_Handler, fake=fake) as fake.url:
        try:
            yield fake
        finally:
            fake.end()
