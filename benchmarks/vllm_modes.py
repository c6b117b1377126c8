"""vLLM in its two modes against the torch engine: how long a load stops generation, and tokens per second.

    .venv-vllm/bin/python benchmarks/vllm_modes.py [--model 128x4] [--requests 32] [--rounds 5] [--json]

`asynchronous`: vLLM generates in a process of its own (`AsyncLLM`). `stepwise`: in this process, step by step
(`LLMEngine`). `unseeded`: asynchronous, without seeds of requests. Requests are those of `engine.py`. Rounds
are interleaved.

load    from vLLM's stop to its next step, while all requests are on their way: the median over loads
rate    tokens a second, alone on the machine
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import median, parser_of, report, require, say, sized, table

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import EngineOptions

MODES: dict[str, dict[str, Any]] = {
    "own": {"kind": "own"},
    "asynchronous": {},
    "unseeded": {"seeded": False},
    "stepwise": {"stepwise": True},
}
ENDLESS = Sampling(max_tokens=1000, ignore_eos=True)
LOADS = sized(9, 3)


class Contestant:
    """An engine that serves a version of `ring`. `pulls`: seconds of each stage."""

    def __init__(self, directory: str, slots: int, ring: Any, *, kind: str = "vllm", **more: Any) -> None:
        options = EngineOptions(
            model_path=directory,
            device="cpu",
            slots=slots,
            max_sequence_tokens=1088,
            keep_kv=False,
            probe=False,
            **more,
        )
        self.engine = open_engine(kind, options)
        self._ring = ring
        self.pulls: list[float] = []
        self._lease = 0
        self.load()

    def load(self) -> None:
        version, started = self._ring.publish(), time.perf_counter()
        self.engine.stage(version, self._ring.reader)
        self.pulls.append(time.perf_counter() - started)
        self.engine.swap(version)

    def generate(self, requests: list[Any]) -> int:
        """Tokens of all `requests`, each to its end."""
        self._submit([(r.prompt, Sampling(max_tokens=r.new_tokens, ignore_eos=True)) for r in requests])
        tokens = 0
        while self.engine.has_work or self.engine.has_finished:
            self.engine.step()
            tokens += sum(len(progress.columns) for progress in self.engine.take_progress())
        return tokens

    def load_pauses(self, requests: list[Any]) -> list[float]:
        """Seconds of each of `LOADS` loads, in which no trajectory goes on."""
        stopped, whole = list[float](), getattr(self.engine, "_load", self.engine.swap)
        name = "_load" if hasattr(self.engine, "_load") else "swap"

        def timed(staged: Any) -> None:
            started = time.perf_counter()
            whole(staged)
            stopped.append(time.perf_counter() - started)

        setattr(self.engine, name, timed)
        self._submit([(request.prompt, ENDLESS) for request in requests])
        for _ in range(LOADS):
            for _ in range(6):
                self.engine.step()
            self.load()
        delattr(self.engine, name)
        self.engine.release(range(len(requests)))
        return stopped

    def _submit(self, works: list[tuple[list[int], Sampling]]) -> None:
        self._lease += 1
        self.engine.submit(
            Work(i, i, self._lease, token_array(prompt), token_array(), sampling, seed=self._lease)
            for i, (prompt, sampling) in enumerate(works)
        )


class Ring:
    """A relay with the weights of the model in `directory`, published anew each time."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        from millrace.trainer.model import named_weights
        from millrace.trainer.publish.publisher import PublishBuffers
        from millrace.weights.relay import RelayWorker
        from millrace.weights.ring import open_reader, open_writer

        self._model = AutoModelForCausalLM.from_pretrained(directory)
        self._buffers = PublishBuffers(named_weights(self._model), torch.float32)
        self._relay, self._version = RelayWorker("relay", slots=3), -1
        endpoint = asyncio.run(self._relay.open(self._buffers.weights_bytes))
        self._writer, self.reader = open_writer(endpoint), open_reader(endpoint)

    def publish(self) -> int:
        self._version += 1
        digest = self._writer.write(self._version, self._buffers.fill())
        asyncio.run(self._relay.stage(self._version, digest))
        return self._version


@contextmanager
def contestants(model: str, count: int) -> Iterator[dict[str, Contestant]]:
    from engine import make_model

    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, *map(int, model.split("x")))
        ring = Ring(directory)
        opened = {name: Contestant(directory, count, ring, **more) for name, more in MODES.items()}
        try:
            yield opened
        finally:
            for one in opened.values():
                one.engine.close()


def measure(model: str, count: int, rounds: int) -> dict[str, dict[str, float]]:
    from engine import make_requests

    requests = make_requests(count)
    rates: dict[str, list[float]] = {name: [] for name in MODES}
    with contestants(model, count) as opened:
        for index in range(rounds + 1):
            for name, one in opened.items():
                started = time.perf_counter()
                tokens = one.generate(requests)
                if index:
                    rates[name].append(tokens / (time.perf_counter() - started))
            say(f"round {index} of {rounds}")
        loads = {name: median(one.load_pauses(requests)) for name, one in opened.items()}
    return {name: {"load_ms": 1e3 * loads[name], "tokens_per_s": median(rates[name])} for name in MODES}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=sized("128x4", "128x1"), help="hidden size x layers")
    parser.add_argument("--requests", type=int, default=sized(32, 4))
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    options = parser.parse_args()
    require(find_spec("vllm"), "vLLM is not here: use the Python that `make setup-vllm` makes")
    torch.set_num_threads(1)
    rows = measure(options.model, options.requests, options.rounds)
    table(rows)
    step_s = {name: options.requests / row["tokens_per_s"] for name, row in rows.items()}
    result = {
        "vllm_load_pause_ms": rows["asynchronous"]["load_ms"],
        "vllm_stepwise_load_pause_ms": rows["stepwise"]["load_ms"],
        "own_over_vllm": rows["own"]["tokens_per_s"] / rows["asynchronous"]["tokens_per_s"],
        "own_over_vllm_stepwise": rows["own"]["tokens_per_s"] / rows["stepwise"]["tokens_per_s"],
        "seeds_ms_a_step": 1e3 * (step_s["asynchronous"] - step_s["unseeded"]),
    }
    report({**result, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
