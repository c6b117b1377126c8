"""Heddle's rollout throughput over its baselines (arXiv:2603.28101): agents that code, search and calculate,
Qwen3-8B to 32B on 64 Hopper GPUs, 16 samples a prompt, up to 40 K tokens, synchronous rollouts.

Published, by summaries of the paper: 1.2 to 2.5 times over Slime, which sends each turn to the least loaded
worker. 1.4 to 2.3 times over verl, which keeps a trajectory on one worker. In an ablation, 1.2 to 1.5 over
both by the placement alone. Not found: batch, turns, tokens of a turn. Answers took 0.4 to 1.4 s on average.

Chosen here: 32 prompts x 8 on 8 replicas, with the sizes of Qwen2.5-7B and 32B, of one and two devices.
Turns of two of the three domains are `DOMAINS`. The same rows come back every step, alike in length, so
that lengths are predicted from the second step on. Throughput is of the time in which the trainer waits for
a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from common import sized
from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.config.tables.schedules import FunctionSchedule, Heddle, Schedule, Synchronous
from millrace.config.tables.training import BatchShape
from millrace.schedule import QueuedView, View, presets
from millrace.schedule import Schedule as Decisions
from millrace.schedule.place import placements
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from published.kept import played
from published.row import Row

REPLICAS = 8
MODELS = sized({"Qwen2.5-7B": 1, "Qwen2.5-32B": 2}, {"Qwen2.5-7B": 1})  # devices of a replica
PROMPTS, GROUP, STEPS = sized((32, 8, 4), (8, 4, 3))


@dataclass(frozen=True, slots=True)
class Domain:
    """Tokens of a turn, fewest and most turns, and median and 99th percentile of an answer in seconds."""

    median: float
    p99: float
    turns: tuple[int, int]
    tool_s: tuple[float, float]
    max_tokens: int = 4096


DOMAINS = {
    "coding": Domain(600.0, 3500.0, (2, 10), (1.0, 6.0)),
    "search": Domain(150.0, 900.0, (3, 9), (0.5, 3.0)),
}
DOMAINS = sized(DOMAINS, {"search": DOMAINS["search"]})
WHY = (
    "all replicas have one tensor parallel size, nothing is preempted, moves carry no keys and values, and "
    "whole groups are placed; turns and lengths are ours"
)


@dataclass(frozen=True, slots=True)
class LeastLoadedTurns(Decisions):
    """Slime: each turn goes to the least loaded replica, wherever its keys and values are."""

    def place(self, view: View, queued: list[QueuedView]) -> list[str | None]:  # type: ignore[override]
        return placements(view, [replace(turn, home="") for turn in queued], mixes_versions=False)


def least_loaded(config: Config) -> Decisions:
    ours = presets.synchronous()
    return LeastLoadedTurns(**{field.name: getattr(ours, field.name) for field in fields(ours)})


SLIME = FunctionSchedule(path=f"{Path(__file__).resolve()}:least_loaded", staleness_max=0)
PUBLISHED = {
    "slime": ("rollout throughput", (1.2, 2.5)),
    "verl": ("rollout throughput", (1.4, 2.3)),
    "both": ("rollout throughput of the placement alone", (1.2, 1.5)),
}
"""Of each baseline: the least and the largest gain. Most of our preset is its placement."""


def rows() -> list[Row]:
    pairs = [(name, domain) for name in MODELS for domain in DOMAINS]
    baselines = {"slime": SLIME, "verl": Synchronous()}
    over = {
        system: [throughput(*pair, Heddle()) / throughput(*pair, schedule) for pair in pairs]
        for system, schedule in baselines.items()
    }
    over["both"] = [ratio for ratios in over.values() for ratio in ratios]
    return [
        Row("heddle", f"{quantity} over {system}, {what}", figure, of(over[system]), "x", why=WHY)
        for system, (quantity, figures) in PUBLISHED.items()
        for what, figure, of in zip(("least", "largest"), figures, (min, max), strict=True)
    ]


def throughput(name: str, domain: str, schedule: Schedule) -> float:
    """Trained tokens per second in which the trainer waits for a batch."""
    shape = DOMAINS[domain]
    config = SimulatedConfig(
        steps=STEPS,
        batch=BatchShape(prompts=PROMPTS, group_size=GROUP),
        schedule=schedule,
        cluster=ClusterSection(
            model=name,
            device="H100",
            trainer_devices=8 * MODELS[name],
            model_parallel=MODELS[name],
            replicas=REPLICAS,
            tensor_parallel=MODELS[name],
            slots=128,
        ),
        lengths=LogNormalLengths(median=shape.median, p99=shape.p99),
        workload=WorkloadSection(
            prompt_tokens=(256, 1024), max_tokens=shape.max_tokens, turns=shape.turns, tool_s=shape.tool_s
        ),
    )
    result = played(config, rows=PROMPTS)
    return float(result["trained_tokens_per_s"] / result["trainer_waits"])
