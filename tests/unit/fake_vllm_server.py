"""A double of `vllm serve`: its routes over HTTP, and a model that is one number.

The log-prob of every token is minus the number in the weights that were loaded last. The n-th token after a
prompt is its length plus n, modulo `VOCAB`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.numpy import load_file

from millrace.engines.server.client import GENERATE, ROUTES

VOCAB = 50
PATIENCE_S = 30.0


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
class FakeVllm:
    url: str = ""
    release: str = "0.32.0"
    routes: set[str] = field(default_factory=lambda: {*ROUTES, "/health"})
    settings: dict[str, Any] = field(default_factory=settings)
    label: str = "default"
    number: float = 0.0
    processed: bool = True
    fails: dict[str, int] = field(default_factory=dict)  # path: status
    foreign: str = ""  # a path that answers as another program would
    calls: list[str] = field(default_factory=list)
    tokens_max: int = 10**9  # of a stream, before `then`
    then: str = "hang"  # or "cut", "end", "error", "abort"
    paused: bool = False
    left: int = 0  # streams whose client went away
    pauses: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, true: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(true, PATIENCE_S)

    def set(self, **fields: Any) -> None:
        with self.changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeVllm

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        fake, path = self.fake, urlsplit(self.path).path
        answers: dict[str, Any] = {
            "/health": {},
            "/openapi.json": {"paths": {path: {} for path in fake.routes}},
            "/version": {"version": fake.release},
            "/server_info": {"vllm_config": fake.settings},
        }
        self._answer(path, answers.get(path))

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        given = json.loads(body) if body else {}
        if path == GENERATE and given.get("stream") and path not in self.fake.fails:
            self._stream(given)
        else:
            self._answer(path, self._done(path, given))

    def _done(self, path: str, given: dict[str, Any]) -> Any:
        fake = self.fake
        if path in fake.fails:
            return {}
        if path == "/pause":
            fake.set(paused=True, pauses=fake.pauses + 1)
        elif path == "/resume":
            fake.set(paused=False)
        elif path == "/update_weight_version":
            fake.set(label=given["new_version"])
        elif path == "/collective_rpc":
            if given["method"] == "reload_weights":
                tensors = load_file(Path(given["kwargs"]["weights_path"]) / "model.safetensors")
                fake.set(number=float(tensors["number"][0]))
        elif path == GENERATE:
            return self._generated(given)
        else:
            return None
        return {"path": path}

    def _generated(self, given: dict[str, Any]) -> Any:
        tokens, params = given["token_ids"], given["sampling_params"]
        logprob = 0.0 if "top_k" in params and self.fake.processed else -self.fake.number
        content = [{"token_id": 1, "logprob": logprob}] * params["max_tokens"]
        told = [None, *({str(token): {"logprob": -self.fake.number}} for token in tokens[1:])]
        return {"prompt_logprobs": told, "choices": [{"logprobs": {"content": content}}]}

    def _answer(self, path: str, answer: Any) -> None:
        self.fake.calls.append(path)
        status = self.fake.fails.get(path, 404 if answer is None else 200)
        body = b"<html>" if path == self.fake.foreign else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    # ------------------------------------------------------------ streams

    def _stream(self, given: dict[str, Any]) -> None:
        fake, params = self.fake, given["sampling_params"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            fake.until(lambda: not fake.paused)
            self._sample(given["token_ids"], params["max_tokens"], params["stop_token_ids"])
        except OSError:
            fake.set(left=fake.left + 1)

    def _sample(self, prompt: list[int], tokens_max: int, ends: list[int]) -> None:
        fake, sent, begun = self.fake, 0, self.fake.pauses
        while True:
            fake.until(lambda n=sent: n < fake.tokens_max or fake.then != "hang" or fake.pauses > begun)
            over = sent >= fake.tokens_max
            if fake.pauses > begun or (over and fake.then == "abort"):
                return self._finish([], "abort", sent)
            if over:
                return self._misbehave()
            token = (len(prompt) + sent) % VOCAB
            sent, content = sent + 1, [{"token_id": token, "logprob": -fake.number}]
            if token in ends or sent == tokens_max:
                return self._finish(content, "stop" if token in ends else "length", sent)
            self._say({"choices": [{"logprobs": {"content": content}, "finish_reason": None}]})

    def _finish(self, content: list[Any], reason: str, sent: int) -> None:
        spans = [{"version": self.fake.label, "start": 0, "end": sent}]
        choice = {"logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
        self._say({"choices": [choice]})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _misbehave(self) -> None:
        if self.fake.then == "error":
            self._say({"error": {"message": "the engine is dead"}})
        if self.fake.then == "cut":
            self.close_connection = True
            self.connection.close()
        else:
            self._chunk(b"")

    def _say(self, chunk: Any) -> None:
        self._chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


@contextlib.contextmanager
def fake_vllm(**fields: Any) -> Iterator[FakeVllm]:
    fake = FakeVllm(**fields)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    http.daemon_threads = True
    fake.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.set(then="end", paused=False, pauses=fake.pauses + 1)
        http.shutdown()
        http.server_close()
        thread.join()
