"""StaleFlow's throughput over its baselines (arXiv:2601.12784): Qwen3-30B-A3B and Qwen2.5-32B on 128 H20.

Published: over synchronous verl 2.01 times on average and 2.68 at most, over verl's asynchronous mode with
strict staleness 1.17 and 1.42. The abstract has the four figures. Summaries of the paper say which baseline
each belongs to, and that eta is 1 to 3: here 1 and 3. Not found: batch, lengths, the split of the
devices, and each figure's own setting.

Chosen here: 16 and 64 prompts x 16 on 16 devices, an eighth of the cluster. 8 of them train, or 12 where all
parameters are active, so that neither side waits much for the other. Lengths have a median of 4000 and a
99th percentile of 30 000 tokens, up to 32 768. Baselines: the colocated pipeline (`pipelines.py`), and our
preset `areal`, which keeps the same bound, for the first model alone: with the second the trainer is the
slower side. (AReaL's published rule only limits what is in flight: in this world with eta 1 it trains tokens
that are up to 6 versions old.)
"""

from __future__ import annotations

from functools import cache
from itertools import product
from statistics import fmean

from common import sized

from millrace.config.tables.schedules import AReaL, Schedule, StaleFlow
from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.costs.training import Training
from millrace_sim.costs.workload import LogNormal, Workload
from published.kept import played
from published.pipelines import Batch, Pipelines
from published.row import Row

DEVICES = 16
MODELS = sized(("Qwen3-30B-A3B", "Qwen2.5-32B"), ("Qwen3-30B-A3B",))
WAYS = 2  # devices of a replica
TRAINERS = {"Qwen3-30B-A3B": 8, "Qwen2.5-32B": 12}
ETAS = sized((1, 3), (1,))
PROMPTS, GROUP = sized(((16, 64), 16), ((8,), 4))
SLOTS, MEDIAN, P99, MAX_TOKENS, QUANTUM, PROMPT_TOKENS = 256, 4000.0, 30_000.0, 32_768, 128, (128, 1024)
WHY = (
    "lengths, batch and split are ours; migration of single trajectories is not simulated; our asynchronous "
    "baseline takes newer weights in the middle of trajectories"
)


def rows() -> list[Row]:
    points = list(product(MODELS, PROMPTS, ETAS))
    over = {"verl": [speed_up(*point, "verl") for point in points]}
    over["verl, asynchronous"] = [speed_up(*point, "areal") for point in points if point[0] == MODELS[0]]
    published = {"verl": (2.01, 2.68), "verl, asynchronous": (1.17, 1.42)}
    return [
        Row("staleflow", f"throughput over {system}, {what}", figure, of(over[system]), "x", why=WHY)
        for system, figures in published.items()
        for what, figure, of in zip(("average", "largest"), figures, (fmean, max), strict=True)
    ]


def speed_up(name: str, prompts: int, eta: int, baseline: str) -> float:
    ours = 1.0 / step_s(name, prompts, StaleFlow(staleness_max=eta))
    if baseline == "verl":
        return ours * colocated_s(name, prompts)
    return ours * step_s(name, prompts, AReaL(eta=eta))


@cache
def colocated_s(name: str, prompts: int) -> float:
    """A step of verl: all devices generate, then all train."""
    shape, chip = model(name), device("H20")
    lengths = LogNormal.from_percentiles(MEDIAN, P99)
    workload = Workload(prompt_tokens=PROMPT_TOKENS, completion=lengths, quantum=QUANTUM)
    training = Training(shape, chip, DEVICES, model_parallel=4)
    costs = Cluster(Generation(shape, chip, WAYS), training, DEVICES // WAYS, "collective").costs(QUANTUM)
    batch = Batch(prompts, GROUP, MAX_TOKENS // QUANTUM, workload)
    return Pipelines(costs, DEVICES // WAYS, SLOTS, batch).colocated()


def step_s(name: str, prompts: int, schedule: Schedule) -> float:
    config = SimulatedConfig(
        steps=sized(max(8, 320 // prompts), 3),
        batch=BatchShape(prompts=prompts, group_size=GROUP),
        schedule=schedule,
        cluster=ClusterSection(
            model=name,
            device="H20",
            trainer_devices=TRAINERS[name],
            model_parallel=4,
            replicas=(DEVICES - TRAINERS[name]) // WAYS,
            tensor_parallel=WAYS,
            slots=SLOTS,
        ),
        lengths=LogNormalLengths(median=MEDIAN, p99=P99),
        workload=WorkloadSection(prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS),
    )
    return float(played(config)["step_s"])
