"""verl's fully asynchronous mode: Qwen2.5-Math-7B, DAPO, up to 28 k tokens, H20 (verl documentation,
docs/advance/fully_async.md, "Experiments"). 512 prompts x 16 a step; asynchronous: weights change every 4 x
4 mini-batches of 32 prompts, partial rollout.

What the trainer takes is given, as verl reports it for each row: `update_actor` and `old_log_prob`, which
differ between runs because their completions do. What the simulator predicts is generation, and who waits
for whom.

Calibrated on two rows, by the grid of `calibrate`: the lengths, log-normal with a median of 1000 tokens and
a 99th percentile of 10 000; and the seconds of a step that are in no stage, 3 asynchronous (beside the
barrier) and 11 colocated (the mean difference of step and stages; rows at 32 and 128 devices agree within 1
s).
"""

from __future__ import annotations

from itertools import product

from common import sized

from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.costs.training import Training
from millrace_sim.costs.workload import LogNormal, Workload
from published.pipelines import Batch, Pipelines
from published.row import Row

MODEL, DEVICE = model("Qwen2.5-7B"), device("H20")
QUANTUM, MAX_TOKENS, SLOTS = 64, 28_672, 256
MEDIAN, P99 = 1000.0, 10_000.0
REST_ASYNC_S, REST_COLOCATED_S = 3.0, 11.0

COLOCATED = {  # devices: (step, gen, old_log_prob, update_actor)
    32: (790.10, 357.41, 107.71, 313.81),
    64: (365.28, 150.72, 70.26, 133.41),
    128: (356.30, 177.85, 53.92, 113.81),
}
ASYNCHRONOUS = {  # (devices of each side, staleness): (step, update_actor)
    (16, 0.5): (294.77, 269.80),
    (32, 0.5): (189.26, 156.98),
    (64, 0.5): (150.63, 113.16),
    (64, 0.3): (146.11, 103.22),
    (64, 0.1): (171.30, 109.12),
    (64, 0.0): (231.34, 98.77),
}
FITTED = {(16, 0.5), (64, 0.0)}


def pipelines(devices: int, median: float = MEDIAN, p99: float = P99) -> Pipelines:
    """Generation on `devices` replicas of one device each."""
    lengths = LogNormal.from_percentiles(median, p99)
    workload = Workload(prompt_tokens=(100, 400), completion=lengths, quantum=QUANTUM)
    layout = Cluster(Generation(MODEL, DEVICE), Training(MODEL, DEVICE, devices), devices, "collective")
    return Pipelines(
        layout.costs(QUANTUM), devices, SLOTS, Batch(sized(512, 32), 16, MAX_TOKENS // QUANTUM, workload)
    )


def rows() -> list[Row]:
    table = []
    for (devices, staleness), (step_s, update_s) in ASYNCHRONOUS.items():
        predicted = pipelines(devices).windowed(staleness, update_s) + REST_ASYNC_S
        what = f"asynchronous {devices}+{devices}, staleness {staleness:g}: step"
        table.append(Row("verl", what, step_s, predicted, "s", (devices, staleness) in FITTED))
    for devices, (step_s, _, log_prob_s, update_s) in COLOCATED.items():
        predicted = pipelines(devices).generation_s + log_prob_s + update_s + REST_COLOCATED_S
        table.append(Row("verl", f"colocated {devices}: step", step_s, predicted, "s"))
    return table


def calibrate() -> tuple[float, float]:
    """The median and p99 that fit the two rows best. Takes minutes."""

    def worst(point: tuple[float, float]) -> float:
        errors = []
        for devices, staleness in FITTED:
            step_s, update_s = ASYNCHRONOUS[devices, staleness]
            predicted = pipelines(devices, *point).windowed(staleness, update_s) + REST_ASYNC_S
            errors.append(abs(predicted / step_s - 1.0))
        return max(errors)

    medians = (400.0, 600.0, 800.0, 1000.0, 1300.0, 1600.0, 2000.0)
    p99s = (4e3, 6e3, 8e3, 10e3, 13e3, 16e3, 20e3)
    return min(product(medians, p99s), key=worst)
