"""What an adapter saves: bytes of a version, memory of the trainer, time of a step, a digest and a pull.

    python benchmarks/adapters.py [--rounds 3] [--tokens 1024] [--json]

A random model of 100 M parameters in float32, on the CPU. `published_fraction`: the bytes of a version of an
adapter over those of the model, at rank 8 in every matrix of the layers. A step is the gradient of a row of
`--tokens` tokens, and AdamW's update. A pull is what a replica does with a version that its relay has.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median, parser_of, report, sized, table
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from millrace.adapters.served_weights import Base, MergingReader
from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Adapter, Optimizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.engines.own.architecture import read_architecture
from millrace.engines.own.parameters import Parameters
from millrace.trainer.adapters.adapted_linear import adapt, published_weights
from millrace.trainer.model import load_model
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.trainer import PolicyTrainer, StepSettings

CPU = torch.device("cpu")
VOCABULARY = sized(32_000, 500)
CASES = {
    "all weights": Adapter(),
    "lora, rank 8": Adapter(rank=8),
    "lora, rank 32": Adapter(rank=32),
    "lora, rank 8, q and v": Adapter(rank=8, targets=("q_proj", "v_proj")),
    "dora, rank 8": Adapter(rank=8, kind="dora"),
}


class Held:
    """A reader of one version, in this process."""

    def __init__(self, pieces: list[NamedBuffer]) -> None:
        self._pieces, self._digest = pieces, digest_buffers(pieces)

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        yield self._digest, self._pieces

    def read(self, version: int, into: Sequence[NamedBuffer], copy: Any = None) -> str:
        for source, target in zip(self._pieces, into, strict=True):
            np.copyto(target.data, source.data)
        return self._digest


def make_model(directory: Path) -> int:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=sized(768, 96),
        intermediate_size=sized(2048, 128),
        num_hidden_layers=sized(12, 2),
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def batch(version: int, tokens: int) -> Batch:
    random = np.random.default_rng(version)
    length = tokens // 4
    sequences = [
        TrainSequence(
            trajectory_id=i,
            columns=TokenColumns.of(
                random.integers(0, VOCABULARY, length).tolist(), [-10.0] * length, [version] * length
            ),
            mask=[True] * length,
            reward=float(i % 2),
            truncated=False,
        )
        for i in range(4)
    ]
    return Batch(version, [TrainGroup(0, random.integers(0, VOCABULARY, 8).tolist(), sequences)])


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(path: Path, adapter: Adapter, *, rounds: int, tokens: int) -> dict[str, float]:
    model = load_model(path, CPU)
    if adapter.rank is not None:
        adapt(model, adapter, published=torch.float32, seed=0)
    settings = StepSettings(
        optimizer=Optimizer(lr=1e-4),
        token_budget=2 * tokens,
        max_tokens=tokens,
        temperature=1.0,
        dtype=torch.float32,
    )
    trainer = PolicyTrainer(model, build(PolicyGradient()), settings)
    steps = [timed(lambda v=v: trainer.step(batch(v, tokens), quarantine=path)) for v in range(rounds + 1)]
    buffers = PublishBuffers(published_weights(model, torch.float32), torch.float32)
    held = Held(buffers.fill())
    reader: Any = held
    if adapter.scale is not None:
        reader = MergingReader(held, Base(str(path), torch.float32), adapter.scale)
    standby = Parameters(read_architecture(str(path)), torch.float32, CPU)
    into = list(standby.buffers())
    pulls = [timed(lambda: (reader.read(0, into), standby.digest())) for _ in range(rounds + 1)]
    states = [t for state in trainer.optimizer.state.values() for t in state.values()]
    kept = [*model.parameters(), *(p.grad for p in trainer.trained if p.grad is not None), *states]
    return {
        "version_bytes": buffers.weights_bytes,
        "trainer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in kept),
        "step_s": median(steps[1:]),
        "digest_s": median([timed(buffers.digest) for _ in range(rounds)]),
        "pull_s": median(pulls[1:]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--tokens", type=int, default=sized(1024, 64))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        parameters = make_model(path)
        rows = {
            name: measure(path, adapter, rounds=options.rounds, tokens=options.tokens)
            for name, adapter in CASES.items()
        }
    whole = rows["all weights"]["version_bytes"]
    for row in rows.values():
        row["fraction"] = row["version_bytes"] / whole
    table(rows)
    found = {"parameters": parameters, "published_fraction": rows["lora, rank 8"]["fraction"], "cases": rows}
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
