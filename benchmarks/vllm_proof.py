"""What the proof after a load can tell apart: rounding, a version that is one step old, a stale head.

    python benchmarks/vllm_proof.py [--python .venv-vllm/bin/python] [--model 768x14] [--json]

Each figure is the mean distance of the log-probs of the proof's tokens, in nats, from those of the plain
model (`engines/vllm/proof.py`). `rounding`: vLLM has the right weights. `step of LR`: vLLM has the version
before one step of AdamW with this learning rate. `stale head`: it has that step but for its output
projection. The random models are sharpened: their matrices are multiplied by 1, 2 or 3, which spreads the
log-probs (`spread`, their standard deviation).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, NO_VLLM, ROOT, VLLM_PYTHON, parser_of, report, require, say, sized, table

RATES = sized((1e-6, 1e-5, 1e-4), (1e-4,))
SHARPENED = sized((1.0, 2.0, 3.0), (1.0,))
DTYPES = ("bfloat16", "float32")
TIMEOUT_S = 1800.0

Weights = Mapping[str, Any]


def make_model(hidden: int, layers: int, sharpened: float) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=10 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 192,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpened if parameter.ndim > 1 else 1.0)
    return model


def stepped(model: Any, rate: float) -> Weights:
    """The weights after one step of AdamW away from them, on 8 random sequences of 32 tokens."""
    import torch

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokens = torch.randint(8192, (8, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return after


class Served:
    """vLLM, and the versions that it takes from a relay's ring."""

    def __init__(self, model: Any, directory: str, dtype: str) -> None:
        from millrace.engines.vllm.start import open_engine
        from millrace.rollout.protocol import EngineOptions
        from millrace.trainer.publish.publisher import PublishBuffers
        from millrace.weights.relay import RelayWorker
        from millrace.weights.ring import open_reader, open_writer

        options = EngineOptions(model_path=directory, device="cpu", slots=2, dtype=dtype)
        self.engine, self._relay, self._next = open_engine(options), RelayWorker("relay", slots=2), 0
        self._dtype, self._buffers = dtype, PublishBuffers
        slot_bytes = self._filled(dict(model.named_parameters())).weights_bytes
        endpoint = asyncio.run(self._relay.open(slot_bytes))
        self._writer, self._reader = open_writer(endpoint), open_reader(endpoint)

    def serve(self, weights: Weights) -> tuple[Any, Any]:
        """The plain model's log-probs and vLLM's, whatever their distance."""
        import torch

        version, self._next = self._next, self._next + 1
        digest = self._writer.write(version, self._filled(weights).fill())
        asyncio.run(self._relay.stage(version, digest))
        self.engine.stage(version, self._reader)
        self.engine._prove = lambda staged: None  # its distance is what is measured
        self.engine.swap(version)
        found, _ = self.engine.logprobs()
        return self.engine._staged.expected, torch.tensor(found)

    def _filled(self, weights: Weights) -> Any:
        import torch

        return self._buffers(weights, getattr(torch, self._dtype))


def measure(hidden: int, layers: int, dtype: str) -> dict[str, dict[str, float]]:
    """One engine for all: it takes any weights of the shape."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(hidden, layers, 1.0)
        model.save_pretrained(directory)
        (Path(directory) / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
        served = Served(model, directory, dtype)
        return {
            f"{dtype}, times {sharpened:g}": distances(served, make_model(hidden, layers, sharpened))
            for sharpened in SHARPENED
        }


def distances(served: Served, model: Any) -> dict[str, float]:
    from millrace.engines.vllm import loading

    pack, start = loading._pack_heads_again, dict(model.named_parameters())
    expected, found = served.serve(start)
    row = {"spread": float(expected.std()), "rounding": distance(expected, found)}
    for rate in RATES:
        after = stepped(model, rate)
        right, ours = served.serve(after)
        row["rounding"] = max(row["rounding"], distance(right, ours))
        row[f"step of {rate:g}"] = distance(right, found)
        served.serve(start)
        loading._pack_heads_again = lambda _: None
        right, stale = served.serve(after)
        loading._pack_heads_again = pack
        row[f"stale head, {rate:g}"] = distance(right, stale)
    return row


def distance(expected: Any, found: Any) -> float:
    return float((expected - found).abs().mean())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=VLLM_PYTHON, help="an interpreter with vLLM")
    parser.add_argument(
        "--model", default=sized("768x14", "192x2"), help="hidden size (of heads of 64) x layers"
    )
    parser.add_argument("--dtype", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hidden, layers = map(int, options.model.split("x"))
    if options.dtype:
        print(json.dumps(measure(hidden, layers, options.dtype)))
        return
    require(Path(options.python).exists(), NO_VLLM.format(options.python))
    rows: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        words = [options.python, __file__, "--model", options.model, "--dtype", dtype]
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise SystemExit(f"{done.stderr[-3000:]}\nstatus {done.returncode}")
        rows |= json.loads(done.stdout.splitlines()[-1])
        say(done.stdout.splitlines()[-1])
    table(rows)
    report({"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
