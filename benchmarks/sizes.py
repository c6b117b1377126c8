"""Which models run on which GPUs, with which settings, as the planner says: the table of reports/sizes.md.

    python benchmarks/sizes.py [--write] [--json]

Nothing is measured. A row is the decision of `millrace train --dry-run` on invented hosts, and the number
that decides: what is refused, or what a warning names, or the peak of each GPU. `--write` puts the table into
the document.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from common import ROOT, parser_of, report, write_table
from sparse_models import SHAPES, sparse_model

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import size
from millrace.placement.describe import warnings
from millrace.placement.hosts import Layout, lay_out
from millrace.placement.memory.engine_memory import CONTEXT_BYTES
from millrace.placement.memory.needs import read_needs
from millrace.rollout.engine_kinds import ENGINES

DOCUMENT = ROOT / "reports" / "sizes.md"
TOKENS = 4096
Section = Mapping[str, Any]
NOTHING: Section = MappingProxyType({})
GPU_BYTES, HOST_BYTES, CORES = 80 * 10**9, 2000 * 10**9, 96


class Case(NamedTuple):
    """`gpus`: of each of `hosts`. `replicas`: of the run. `tokens`: of the longest sequence."""

    model: str
    gpus: int
    trainer: Section = NOTHING
    rollout: Section = NOTHING
    tokens: int = TOKENS
    hosts: int = 1
    dtype: str = "bfloat16"
    optimizer: Section = NOTHING
    adapter: Section = NOTHING

    @property
    def settings(self) -> str:
        """What differs from the defaults, as keys of the configuration."""
        settings: dict[str, Any] = {f"trainer.{key}": value for key, value in self.trainer.items()}
        settings |= {f"rollout.{key}": value for key, value in self.rollout.items()}
        settings |= {f"optimizer.{key}": value for key, value in self.optimizer.items()}
        settings |= {f"adapter.{key}": value for key, value in self.adapter.items()}
        if self.tokens != TOKENS:
            settings["rollout.max_sequence_tokens"] = self.tokens
        if self.dtype == "float32":
            settings["model.dtype"] = self.dtype
        return ", ".join(f"`{key}` {str(value).lower()}" for key, value in settings.items()) or "defaults"


VLLM = {"engine": "vllm", "slots": 256}
CASES = [
    Case("0.5b", 1, rollout={"replicas": 1}),
    Case("0.5b", 1, rollout={"replicas": 1}, dtype="float32"),
    Case("7b", 1, rollout={"replicas": 1}),
    Case("7b", 1, rollout={"replicas": 1}, adapter={"rank": 16}),
    Case("7b", 2, {"offload": True}, {"replicas": 1}),
    Case("7b", 8, rollout={"replicas": 7}),
    Case("7b", 8, {"shard": 2}, {"replicas": 6}),
    Case("7b", 8, {"shard": 4}, {"replicas": 4}),
    Case("7b", 8, {"shard": 4}, {"replicas": 4, "slots": 256}, 32_768),
    Case("7b", 8, {"shard": 4}, {"replicas": 4, **VLLM}, 32_768),
    Case("7b", 8, {"shard": 4}, {"replicas": 4, **VLLM}, 131_072),
    Case("7b", 8, {"sequence": 4}, {"replicas": 4, **VLLM}, 131_072),
    Case("7b", 8, {"shard": 4}, {"replicas": 4, **VLLM}, dtype="float32"),
    Case("32b", 8, {"shard": 4}, {"replicas": 4}),
    Case("32b", 8, {"shard": 4, "offload": True}, {"replicas": 2, "tensor": 2, **VLLM}),
    Case("32b", 8, {"shard": 8, "hosts": 2}, {"replicas": 4, "tensor": 2, **VLLM}, hosts=2),
    Case("32b", 8, {"shard": 16, "hosts": 2}, {"replicas": 4, "tensor": 2, **VLLM}, hosts=3),
    Case("70b", 8, {"shard": 4, "offload": True}, {"replicas": 1, "tensor": 4, **VLLM}),
    Case("70b", 8, {"shard": 16, "hosts": 2}, {"replicas": 2, "tensor": 4, **VLLM}, hosts=3),
    Case("70b", 8, {"shard": 32, "hosts": 4}, {"replicas": 2, "tensor": 4, **VLLM}, hosts=5),
]


class Answer(NamedTuple):
    fits: str
    number: str


def answer(case: Case, directory: Path) -> Answer:
    config = configuration(case, sparse_model(directory / case.model, SHAPES[case.model]))
    memory = ENGINES[config.rollout.engine].memory
    try:
        needs = read_needs(config, on_gpu=True, replica_memory=memory)
        layout = lay_out(config, nodes(case), needs)
    except ConfigError as error:
        return Answer("no", str(error).splitlines()[0].rstrip("."))
    texts = [text.partition(". Lower")[0] for one in layout.placements for text in warnings(one, config)]
    lacking = [text for text in texts if " are left for it" in text]
    return Answer("no", lacking[0]) if lacking else Answer("yes", numbers(layout))


def numbers(layout: Layout) -> str:
    """Of the fullest GPU of the trainer and of a replica."""
    needs, main = layout.main.needs, layout.main
    trainer = main.rank_peak_bytes + CONTEXT_BYTES
    replica = needs.replica.device_bytes + needs.activation_memory.replica_bytes + CONTEXT_BYTES
    return f"a rank of the trainer {size(trainer)}, a GPU of a replica {size(replica)}"


def configuration(case: Case, path: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "dtype": case.dtype, "recompute": True},
            "task": {"kind": "gym", "name": "chain_sum"},
            "reward": {"kind": "gym"},
            "batch": {"token_budget": max(8192, case.tokens)},
            "sampling": {"max_tokens": case.tokens // 2},
            "trainer": dict(case.trainer),
            "optimizer": dict(case.optimizer),
            "adapter": dict(case.adapter),
            "rollout": {"max_sequence_tokens": case.tokens, **case.rollout},
        }
    )


def nodes(case: Case) -> list[Host]:
    gpus = tuple(Gpu(index, "H100", GPU_BYTES, GPU_BYTES) for index in range(case.gpus))
    address = "" if case.hosts == 1 else "10.0.0."
    return [
        Host(f"node-{i}", CORES, HOST_BYTES, HOST_BYTES, gpus, address and f"{address}{i + 1}")
        for i in range(case.hosts)
    ]


def rows() -> list[str]:
    """The table, in Markdown."""
    lines = ["| model | GPUs | settings | fits | the number that decides |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            fits, number = answer(case, Path(place))
            gpus = f"{case.hosts} x {case.gpus}" if case.hosts > 1 else str(case.gpus)
            lines.append(f"| {case.model.upper()} | {gpus} | {case.settings} | {fits} | {number} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    lines = rows()
    print("\n".join(lines))
    if options.write:
        write_table(DOCUMENT, "sizes.py", lines)
    report({"rows": lines, "num_rows": len(CASES)}, as_json=options.json)


if __name__ == "__main__":
    main()
