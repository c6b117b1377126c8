"""vLLM with adapters beside the base weights (`rollout.native_adapters`) against adapters that are merged.

    .venv-vllm/bin/python benchmarks/vllm_adapters.py [--model 512x8] [--rank 8] [--requests 32] [--json]

Both generate in a process of vLLM's own. Requests are those of `engine.py`. Rounds are interleaved.

pull    the stage of a version, while vLLM generates: the median over loads
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
from vllm_modes import Contestant

from millrace.config.tables.training import Adapter
from millrace.devices.served_weights import Base, MergingReader
from millrace.rollout.protocol import NativeAdapter

WAYS = "merged", "native"


class AdapterRing:
    """A relay with adapters of the model in `directory`, published anew each time."""

    def __init__(self, directory: str, adapter: Adapter) -> None:
        from transformers import AutoModelForCausalLM

        from millrace.trainer.adapted_linear import adapt, adapted_layers, published_weights
        from millrace.trainer.publish.publisher import PublishBuffers
        from millrace.weights.relay import RelayWorker
        from millrace.weights.ring import open_reader, open_writer

        model = AutoModelForCausalLM.from_pretrained(directory)
        adapt(model, adapter, published=torch.float32, seed=0)
        self._layers = adapted_layers(model)
        self.targets = tuple(sorted({name.rpartition(".")[2] for name in self._layers}))
        self._buffers = PublishBuffers(published_weights(model, torch.float32), torch.float32)
        self._relay, self._version = RelayWorker("relay", slots=3), -1
        endpoint = asyncio.run(self._relay.open(self._buffers.weights_bytes))
        self._writer, self.reader = open_writer(endpoint), open_reader(endpoint)

    def publish(self) -> int:
        self._version += 1
        for layer in self._layers.values():
            layer.lora_B.data.normal_(0, 0.01)
        digest = self._writer.write(self._version, self._buffers.fill())
        asyncio.run(self._relay.stage(self._version, digest))
        return self._version


class MergedRing:
    """The same versions as whole weights."""

    def __init__(self, ring: AdapterRing, directory: str, scale: float) -> None:
        self.reader = MergingReader(ring.reader, Base(directory, torch.float32), scale)
        self.publish = ring.publish


@contextmanager
def contestants(model: str, count: int, rank: int) -> Iterator[dict[str, Contestant]]:
    from engine import make_model

    adapter = Adapter(rank=rank)
    assert adapter.scale is not None
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, *map(int, model.split("x")))
        ring = AdapterRing(directory, adapter)
        native: dict[str, Any] = {"native_adapter": NativeAdapter(rank, adapter.scale, ring.targets)}
        opened = {
            "merged": Contestant(directory, count, MergedRing(ring, directory, adapter.scale)),
            "native": Contestant(directory, count, ring, **native),
        }
        try:
            yield opened
        finally:
            for one in opened.values():
                one.engine.close()


def measure(options: Any) -> dict[str, dict[str, float]]:
    from engine import make_requests

    requests = make_requests(options.requests)
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with contestants(options.model, options.requests, options.rank) as opened:
        for index in range(options.rounds + 1):
            for name, one in opened.items():
                started = time.perf_counter()
                tokens = one.generate(requests)
                if index:
                    rates[name].append(tokens / (time.perf_counter() - started))
            say(f"round {index} of {options.rounds}")
        loads = {name: median(one.load_pauses(requests)) for name, one in opened.items()}
        pulls = {name: median(one.pulls[1:]) for name, one in opened.items()}
    return {
        name: {
            "pull_ms": 1e3 * pulls[name],
            "load_ms": 1e3 * loads[name],
            "tokens_per_s": median(rates[name]),
        }
        for name in WAYS
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=sized("512x8", "128x1"), help="hidden size x layers")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--requests", type=int, default=sized(32, 4))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    options = parser.parse_args()
    require(find_spec("vllm"), "vLLM is not here: use the Python that `make setup-vllm` makes")
    torch.set_num_threads(1)
    rows = measure(options)
    table(rows)
    merged, native = (rows[name] for name in WAYS)
    ratios = {f"native_over_merged_{key}": native[key] / merged[key] for key in merged}
    report({**ratios, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
