"""What `millrace train --dry-run` says of a rank of the trainer, over what its step takes of fake tensors.

    python benchmarks/memory_plan.py [--quick] [--json]

Fake tensors have shapes and no numbers, so the trainer's own code runs at any size on a CPU, and every byte
that is alive is counted (`fake_memory.py`). Models have the shapes of Qwen2.5. Ranks divide weights (FSDP),
matrices or tokens. `predicted_over_fake` of a row is of all memory, `moment_over_fake` without masters,
gradients and moments of the optimizer. Both should be a little above 1. Fake tensors tell nothing of an
allocator's holes, nor of copies that a GPU makes ahead of its computation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import parser_of, report, say, sized, table
from fake_memory import step_memory
from sparse_models import SHAPES, sparse_model

from millrace.config.schema import Config
from millrace.placement.memory.needs import Needs, read_needs


class Case(NamedTuple):
    model: str
    trainer: dict[str, Any]
    tokens: int = 8192
    recompute: bool = True
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        ranks = " x ".join(f"{key} {count}" for key, count in self.trainer.items()) or "alone"
        kept = "" if self.recompute else ", activations kept"
        return f"{self.model}, {ranks}, {self.dtype}, {self.tokens:,} tokens{kept}"


SMALL = [
    Case("0.5b", {}),
    Case("0.5b", {"shard": 8}),
    Case("7b", {}),
    Case("7b", {"shard": 8}),
    Case("70b", {"shard": 32}),
]
CASES = [
    *SMALL,
    Case("0.5b", {}, recompute=False),
    Case("7b", {}, dtype="float32"),
    Case("7b", {"shard": 8}, 16_384),
    Case("7b", {"shard": 8}, recompute=False),
    Case("7b", {"shard": 8}, dtype="float32"),
    Case("7b", {"shard": 4, "tensor": 2}),
    Case("7b", {"shard": 4, "sequence": 2}, 16_384),
    Case("32b", {}),
    Case("32b", {"shard": 16}),
    Case("70b", {"shard": 32}, 32_768),
    Case("70b", {"shard": 8, "tensor": 4}, 16_384),
]


def configuration(case: Case, model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": case.dtype, "recompute": case.recompute},
            "task": {"kind": "gym", "name": "chain_sum"},
            "reward": {"kind": "gym"},
            "trainer": case.trainer,
            "batch": {"token_budget": case.tokens},
            "sampling": {"max_tokens": 2048},
            "rollout": {"max_sequence_tokens": 4096},
        }
    )


def needs_of(case: Case, directory: Path) -> Needs:
    path = sparse_model(directory / case.model, SHAPES[case.model])
    return read_needs(configuration(case, path), on_gpu=True)


def measure(case: Case, directory: Path) -> dict[str, float]:
    needs = needs_of(case, directory)
    fake = step_memory(SHAPES[case.model], configuration(case, directory / case.model))
    predicted = needs.trainer.device_bytes + needs.activation_memory.trainer_bytes
    return {
        "predicted_gb": predicted / 1e9,
        "fake_gb": fake.peak / 1e9,
        "predicted_over_fake": predicted / fake.peak,
        "moment_over_fake": (predicted - fake.kept) / fake.moment,
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        for case in sized(CASES, SMALL):
            say(str(case))
            rows[str(case)] = measure(case, Path(place))
    table(rows)
    ratios = {name: row["predicted_over_fake"] for name, row in rows.items()}
    result = {
        "predicted_over_fake_7b": ratios[str(Case("7b", {}))],
        "predicted_over_fake_70b_ranks": ratios[str(Case("70b", {"shard": 32}))],
        "predicted_over_fake_min": min(ratios.values()),
        "predicted_over_fake_max": max(ratios.values()),
        "moment_over_fake_min": min(row["moment_over_fake"] for row in rows.values()),
        "moment_over_fake_max": max(row["moment_over_fake"] for row in rows.values()),
        "rows": rows,
    }
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
