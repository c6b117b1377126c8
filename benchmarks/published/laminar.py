"""Laminar's throughput over four other systems (arXiv:2510.12633, section 8): Qwen2.5-7B, 32B, 72B on 64 to
1024 H800, 512 prompts x 16 a batch, 16 k tokens of completion, p99 about ten times the median. The paper's
text gives averages; the same averages are taken here over 64, 256 and 1024 devices for each model.

verl, one-step and stream are pipelines (`published/pipelines.py`), AReaL and Laminar the real controller with
their presets (Laminar unbounded, AReaL with eta 4). Everybody gets the split of the devices that suits it
best, of eighths. Clusters are simulated at a fraction of their size, batch and devices alike, which leaves
every device its load. Nothing is calibrated: lengths are the paper's, everything else is the default of the
cost model.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

from common import sized

from millrace.config.tables.schedules import AReaL, Laminar, Schedule
from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.costs.training import Training
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.measure import measure
from millrace_sim.setup import scenario
from published.pipelines import Batch, Pipelines
from published.row import Row

DEVICE = device("H800")
PARALLEL = {
    "Qwen2.5-7B": 1,
    "Qwen2.5-32B": 4,
    "Qwen2.5-72B": 8,
}  # devices of a replica, and of a trainer rank
SIZES = {64: 4, 256: 8, 1024: 8}  # devices: simulated at this fraction
MEDIAN, P99, MAX_TOKENS, QUANTUM = 1600.0, 16_000.0, 16_384, 64
PROMPTS, GROUP, SLOTS, UPDATES = sized(512, 32), 16, 512, 16
PROMPT_TOKENS = (512, 2048)
EIGHTHS = (1, 2, 3, 4, 5, 6, 7)
PUBLISHED = {"verl": 2.56, "one-step": 1.98, "stream": 1.93, "areal": 1.39}


def rows() -> list[Row]:
    points = [speed_ups(name, devices) for name in PARALLEL for devices in SIZES]
    table = [
        Row("laminar", f"speed-up over {system}, average", published, fmean(p[system] for p in points), "x")
        for system, published in PUBLISHED.items()
    ]
    largest = max(point["verl"] for point in points)
    return [*table, Row("laminar", "speed-up over verl, largest", 5.48, largest, "x")]


def speed_ups(name: str, devices: int) -> dict[str, float]:
    """Laminar's throughput over that of each other system."""
    shrink = SIZES[devices]
    count = devices // shrink
    whole = pipelines(name, count, count, shrink)
    splits = {t: pipelines(name, t, count - t, shrink) for t in trainer_sizes(name, count, shrink)}
    near = best_splits(splits)
    step_s = {
        "verl": whole.colocated(),
        "one-step": min(split.one_step() for split in splits.values()),
        "stream": min(split.stream() for split in splits.values()),
        "areal": min(map(partial(controlled_s, name, count, shrink, AReaL(eta=4)), near)),
    }
    laminar_s = min(map(partial(controlled_s, name, count, shrink, Laminar(staleness_max=None)), near))
    return {system: seconds / laminar_s for system, seconds in step_s.items()}


def trainer_sizes(name: str, count: int, shrink: int) -> list[int]:
    """Whole ranks, with a replica left, and states that fit where the cluster has its real size."""
    degree = PARALLEL[name]
    sizes = {count * eighths // 8 // degree * degree for eighths in EIGHTHS}
    whole = {
        size: Training(model(name), DEVICE, size * shrink, model_parallel=degree) for size in sizes if size
    }
    return sorted(
        size for size in whole if count - size >= degree and whole[size].fits(PROMPT_TOKENS[1] + MAX_TOKENS)
    )


def best_splits(splits: dict[int, Pipelines]) -> list[int]:
    """The trainer sizes at which training and the mean of generation are closest, three at most."""

    def imbalance(size: int) -> float:
        split = splits[size]
        return max(split.train_s, fmean(split.ready_s)) / min(split.train_s, fmean(split.ready_s))

    return sorted(splits, key=imbalance)[:3]


def pipelines(name: str, trainer: int, rollout: int, shrink: int) -> Pipelines:
    shape, degree = model(name), PARALLEL[name]
    generation = Generation(shape, DEVICE, degree)
    training = Training(
        shape, DEVICE, trainer, model_parallel=min(trainer, degree), log_prob_pass=True, updates=UPDATES
    )
    replicas = rollout // degree
    lengths = LogNormal.from_percentiles(MEDIAN, P99)
    workload = Workload(prompt_tokens=PROMPT_TOKENS, completion=lengths, quantum=QUANTUM)
    costs = Cluster(generation, training, replicas, "collective").costs(QUANTUM)
    batch = Batch(PROMPTS // shrink, GROUP, MAX_TOKENS // QUANTUM, workload)
    return Pipelines(costs, replicas, SLOTS, batch)


def controlled_s(name: str, count: int, shrink: int, schedule: Schedule, trainer: int) -> float:
    """Seconds of a step under the real controller."""
    degree = PARALLEL[name]
    config = SimulatedConfig(
        steps=sized(10, 3),
        batch=BatchShape(prompts=PROMPTS // shrink, group_size=GROUP),
        schedule=schedule,
        cluster=ClusterSection(
            model=name,
            device=DEVICE.name,
            trainer_devices=trainer,
            model_parallel=degree,
            replicas=(count - trainer) // degree,
            tensor_parallel=degree,
            slots=SLOTS,
            log_prob_pass=True,
            transport="relay" if isinstance(schedule, Laminar) else "collective",
        ),
        lengths=LogNormalLengths(median=MEDIAN, p99=P99),
        workload=WorkloadSection(prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS),
    )
    return measure(scenario(config))[0].step_s
