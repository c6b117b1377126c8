"""A double of SGLang: `sglang_wire` over the number of `fake_server`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_server import BROKEN, VOCAB, FakeServer, Faulty

from http_double import Part, serving
from sglang_wire import SglangHandler, settings


@dataclass
class FakeSglang(FakeServer):
    generate = "/generate"
    loading = ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation")
    pausing, vocab = 2, VOCAB

    settings: dict[str, Any] = field(default_factory=settings)
    idle: bool = True

    def sample(self, given: dict[str, Any]) -> Iterator[Part]:
        params, whole = given["sampling_params"], False
        ends = () if params["ignore_eos"] else params["stop_token_ids"]
        try:
            for tokens, reason in self.parts(len(given["input_ids"]), params["max_new_tokens"], ends):
                yield (
                    [(token, math.nan if -logprob == BROKEN else logprob) for token, logprob in tokens],
                    reason,
                )
            whole = True
        finally:
            if not whole:
                self.set(left=self.left + 1)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [-self.number] * (len(tokens) - 1)

    def top_logprob(self, given: dict[str, Any]) -> float:
        ((_, bias),) = given["sampling_params"]["logit_bias"].items()
        if self.number == BROKEN:
            return math.nan
        biased = bias / (given["sampling_params"]["temperature"] if self.processed else 1.0)
        return -math.log1p((VOCAB - 1) * math.exp(-biased))

    def check_idle(self) -> bool:
        return self.idle


class _Handler(Faulty, SglangHandler):
    fake: FakeSglang

    def take(self, path: str, given: dict[str, Any]) -> None:
        if path == "/health" and self.fake.paused:
            self.fake.calls.append(path)
            self.answer(b"", 503)
        else:
            super().take(path, given)


@contextlib.contextmanager
def fake_sglang(**fields: Any) -> Iterator[FakeSglang]:
    fake = FakeSglang(**fields)
    with serving(_Handler, fake=fake, served=fake) as fake.url:
        try:
            yield fake
        finally:
            fake.end()
