"""StreamRL's throughput over a colocated baseline (arXiv:2504.15930): Qwen2.5-72B, responses up to 20 k
tokens.

Published: up to 2.66 times the throughput of verl, and up to 1.33 times per cost with H20 for generation
and H800 for training, across data centers (abstract). A reader's notes have the ablation at 72B and 20 k:
dispatching by length 1.08 times, with streams 1.23, asynchronous 1.48; and prices of 2.85 for an H800 and 1
for an H20.

Not found: batch, lengths, and the number of devices. Chosen: 64 H800, half of them training, 64 prompts x
8, a median of 3,000 and a 99th percentile of 20,000 tokens. Rows come back every second batch, and their
completions are alike in length, so that past lengths say something of the next ones. Cost: Qwen2.5-7B.
"""

from __future__ import annotations

from common import sized

from millrace.config.tables.schedules import RollFlash, Schedule, StreamRL
from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from published.kept import played
from published.row import Row
from published.same_world import pipelines

PROMPTS, GROUP, STEPS = sized((64, 8, 8), (8, 4, 3))
DEVICES, MAX_TOKENS = sized((64, 20_480), (32, 4096))
ROWS = 2 * PROMPTS
PRICES = {"H800": 2.85, "H20": 1.0}
UNARRANGED = RollFlash(alpha=1, redundant_samples=0, redundant_groups=0, mix="between")
WHY = (
    "batch, lengths and devices are ours; a step begins when its batch is complete; the published 1.08 is "
    "on a colocated system, ours on an asynchronous one, which hides a long completion anyway"
)
COST_WHY = "prices are of a reader's notes; batch, lengths and devices are ours; no slow link is simulated"


def rows() -> list[Row]:
    step_s = {one.kind: played(large(one), rows=ROWS)["step_s"] for one in (StreamRL(), UNARRANGED)}
    whole = large(StreamRL(), trainer=DEVICES, replicas=DEVICES // 8)
    colocated_s = pipelines(whole, rows=ROWS).colocated()
    ours = step_s["streamrl"]
    mixed = max(per_cost("H20", *one) for one in sized(((16, 40), (8, 62)), ((2, 4),)))
    alone = max(per_cost("H800", *one) for one in sized(((16, 16), (8, 24)), ((2, 2),)))
    return [
        Row("streamrl", "throughput over colocated, 72B", 1.48, colocated_s / ours, "x", why=WHY),
        Row("streamrl", "of it by dispatching", 1.08, step_s["roll_flash"] / ours, "x", why=WHY),
        Row("streamrl", "throughput per cost, H20 generate", 1.33, mixed / alone, "x", why=COST_WHY),
    ]


def large(
    schedule: Schedule, *, trainer: int = DEVICES // 2, replicas: int = DEVICES // 16
) -> SimulatedConfig:
    return config_of("Qwen2.5-72B", "H800", schedule, trainer, replicas, tensor=8)


def per_cost(device: str, trainer: int, replicas: int) -> float:
    """Trained tokens per second and price: `trainer` H800 train, and `replicas` devices generate."""
    config = config_of("Qwen2.5-7B", device, StreamRL(), trainer, replicas, tensor=1)
    price = trainer * PRICES["H800"] + replicas * PRICES[device]
    return float(played(config, rows=ROWS)["trained_tokens_per_s"]) / price


def config_of(
    model: str, generates: str, schedule: Schedule, trainer: int, replicas: int, *, tensor: int
) -> SimulatedConfig:
    return SimulatedConfig(
        steps=STEPS,
        batch=BatchShape(prompts=PROMPTS, group_size=GROUP),
        schedule=schedule,
        cluster=ClusterSection(
            model=model,
            device="H800",
            replica_device=generates,
            trainer_devices=trainer,
            model_parallel=min(trainer, 2 * tensor),
            replicas=replicas,
            tensor_parallel=tensor,
            slots=128,
        ),
        lengths=LogNormalLengths(median=3000, p99=20_000),
        workload=WorkloadSection(prompt_tokens=(64, 512), max_tokens=MAX_TOKENS),
    )
