"""AReaL's training throughput against its staleness bound eta (arXiv:2505.24298, ablation of system
efficiency): 512 prompts x 16 on 16 hosts of 8 H800, three quarters of them generating, up to 27 648 tokens.

Run here with the real controller at an eighth of the size: 12 replicas, 4 trainer devices, 64 prompts, so
that every device has the load that it had there. Throughput is compared relative to the unbounded one,
because the paper's model and prompt lengths are not all given. Calibrated on the two ends, eta 0 and
unbounded: the median length, 4500 tokens, with the 99th percentile at the limit.

What admits is the paper's own rule (equation 3), and not our preset's, which counts groups by their birth so
that the bound holds for any order of completion, and lets fewer start at a small eta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import sized

from millrace.config.schema import Config
from millrace.config.tables.schedules import FunctionSchedule
from millrace.config.tables.training import BatchShape
from millrace.schedule import Schedule, View, presets
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.measure import measure
from millrace_sim.setup import scenario
from published.row import Row

THROUGHPUT = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4}
UNBOUNDED, UNBOUNDED_ETA = 396.8, 1000
MEDIAN, P99 = 4500.0, 27_000.0


@dataclass(frozen=True, slots=True)
class PublishedRule(Schedule):
    """Starts groups while N_r <= B (i + eta + 1), i the newest version that can be served. Of the N_r that
    ever started, those of the steps done and under way are not in the view."""

    eta: int = 0

    def wanted_groups_max(self, view: View) -> int:
        ahead = view.newest + self.eta + 1 - view.version
        return max(0, min(view.steps_left, ahead)) * view.batch_groups


def __getattr__(name: str) -> Callable[[Config], Schedule]:
    """`eta_N`: the rule with that eta. It is no bound of ours, so the configuration names none."""
    if not name.startswith("eta_"):
        raise AttributeError(name)
    eta = int(name.removeprefix("eta_"))

    def rule(config: Config) -> Schedule:
        return published_rule(eta)

    return rule


def published_rule(eta: int) -> Schedule:
    ours = presets.areal(eta=eta)
    return PublishedRule(
        kind="areal",
        staleness_max=None,
        mixes_versions=True,
        admit_rule=ours.admit_rule,
        route_rule=ours.route_rule,
        refresh_rule=ours.refresh_rule,
        take_rule=ours.take_rule,
        eta=eta,
    )


def throughput(eta: int) -> float:
    """Trained tokens per second."""
    config = SimulatedConfig(
        steps=sized(36 if eta > 4 else 18, 3),
        batch=BatchShape(prompts=sized(64, 8), group_size=16),
        schedule=FunctionSchedule(path=f"{Path(__file__).resolve()}:eta_{eta}", staleness_max=None),
        cluster=ClusterSection(
            model="Qwen2.5-1.5B",
            device="H800",
            trainer_devices=4,
            replicas=12,
            slots=256,
            transport="disk",
        ),
        lengths=LogNormalLengths(median=MEDIAN, p99=P99),
        workload=WorkloadSection(prompt_tokens=(128, 512), max_tokens=27_648),
    )
    return measure(scenario(config))[0].trained_tokens_per_s


def rows() -> list[Row]:
    unbounded = throughput(UNBOUNDED_ETA)
    return [
        Row(
            "areal",
            f"throughput at eta {eta}, of the unbounded",
            published / UNBOUNDED,
            throughput(eta) / unbounded,
            "",
            calibrates=eta == 0,
        )
        for eta, published in THROUGHPUT.items()
    ]
