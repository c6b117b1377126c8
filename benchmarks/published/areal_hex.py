"""AReaL-Hex's gain of mixed devices (arXiv:2511.00796): H800 and H20 together, against each kind alone, for
the same price.

Published (abstract): up to 1.50 times the throughput for the same price, or the same throughput for 1.46
times less, with models of 1.5B to 14B on mathematics. Not found: prices, numbers of devices, batch, and
lengths.

Chosen: prices of 2.85 and 1 (a reader's notes on StreamRL, arXiv:2504.15930), a price of 16 H800, 64
prompts x 16, a median of 3,000 and a 99th percentile of 20,000 tokens up to 16,384. Each cluster has the
layout that our planner predicts to be best, and AReaL's schedule with eta 4.
"""

from __future__ import annotations

from common import sized

from millrace.config.tables.schedules import AReaL
from millrace_sim.config import LogNormalLengths, PlanBatch, PlanConfig, Search, WorkloadSection
from millrace_sim.costs.models import model
from millrace_sim.plan.layouts import layouts
from millrace_sim.plan.ranking import demand_of, devices_of
from millrace_sim.plan.search import Candidate, simulated_config
from published.kept import played
from published.row import Row

MODELS = sized(("Qwen2.5-1.5B", "Qwen2.5-14B"), ("Qwen2.5-1.5B",))
MIXED, ALONE = {"H800": 8, "H20": 22}, ({"H800": 16}, {"H20": 45})
PROMPTS, GROUP, STEPS, MAX_TOKENS = sized((64, 16, 8, 16_384), (8, 4, 3, 2048))
WHY = "prices, devices, lengths and batch are ours; the published figures are the largest of several models"


def rows() -> list[Row]:
    gains = {}
    for name in MODELS:
        gains[name] = throughput(name, MIXED) / max(throughput(name, alone) for alone in ALONE)
    what = "throughput for the same price, mixed"
    return [Row("areal_hex", f"{what}, {name}", 1.50, gain, "x", why=WHY) for name, gain in gains.items()]


def throughput(name: str, devices: dict[str, int]) -> float:
    """Trained tokens per second under the best predicted layout."""
    config = PlanConfig(
        model=name,
        devices=devices,
        batch=PlanBatch(prompts=(PROMPTS,), group_size=GROUP),
        lengths=LogNormalLengths(median=3000, p99=20_000),
        workload=WorkloadSection(prompt_tokens=(64, 512), max_tokens=MAX_TOKENS),
        search=Search(steps=STEPS, replicas_max=64),
    )
    best = layouts(model(name), devices_of(config), demand_of(config))[0]
    simulated, scale = simulated_config(config, Candidate(best, PROMPTS, AReaL(eta=4)))
    assert scale == 1, scale
    return float(played(simulated)["trained_tokens_per_s"])
