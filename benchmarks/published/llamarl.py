"""LlamaRL's step times (arXiv:2505.24034): 8B, 70B and 405B, synchronous baseline against LlamaRL, fp8
generation for 405B. Global batch 2048; 8B and 70B taken to be on 256 H100, 405B on 1024.

Asynchronous: problem (7) of the paper, solved with eta(b) of the cost model. Synchronous: problem (6) for
the trainer and the layout; generation with it as simulated, so that the batch waits for its longest
completion. Lengths are not published. Calibrated on the asynchronous 8B and 70B steps: the mean completion,
and the seconds of a step that do not depend on the model (prompts, rewards, data, hand-over). The longest
completion is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import model
from millrace_sim.costs.training import Training
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.plan.theory import Problem, solve_asynchronous, solve_synchronous
from published.pipelines import Batch, Pipelines
from published.row import Row

DEVICE, SAMPLES, GROUP = device("H100"), 2048, 8
PROMPT, LONGEST, QUANTUM = 300, 2048, 16
TABLE = {  # model: (devices, asynchronous step s, synchronous step s, precision of generation)
    "Llama-3.1-8B": (256, 8.90, 22.4, "bf16"),
    "Llama-3.1-70B": (256, 20.67, 82.3, "bf16"),
    "Llama-3.1-405B": (1024, 59.5, 635.8, "fp8"),
}
FITTED = ("Llama-3.1-8B", "Llama-3.1-70B")
MEMORY = 0.9


def problem(name: str, dtype: str, completion: float) -> Problem:
    shape, devices = model(name), TABLE[name][0]
    length = int(PROMPT + completion)

    @lru_cache(None)
    def generate_s(batch: int, degree: int) -> float:
        return Generation(shape, DEVICE, degree, dtype).sample_s(batch, PROMPT, completion)

    @lru_cache(None)
    def train_s(batch: int, degree: int) -> float:
        return training(name, degree).sample_s(batch, length)

    return Problem(
        samples=SAMPLES,
        devices=devices,
        memory=DEVICE.memory_bytes * MEMORY,
        weights=shape.weights_bytes(),
        activations=training(name, 1).activation_bytes(length),
        kv=shape.kv_token_bytes() * length,
        train_s=train_s,
        generate_s=generate_s,
    )


def training(name: str, degree: int) -> Training:
    return Training(model(name), DEVICE, TABLE[name][0], model_parallel=degree, recompute=False)


def asynchronous_s(name: str, completion: float) -> float:
    return solve_asynchronous(problem(name, TABLE[name][3], completion)).step_s


def synchronous_s(name: str, completion: float) -> float:
    """Training by (6), then generation with its layout until the longest completion is there."""
    posed, devices = problem(name, "bf16", completion), TABLE[name][0]
    best = solve_synchronous(posed)
    degree, replicas = best.model_parallel, devices // best.model_parallel
    train_s = SAMPLES / devices * degree * posed.train_s(best.train_batch, degree)
    lengths = LogNormal.from_percentiles(0.9 * completion, LONGEST)
    workload = Workload(prompt_tokens=(PROMPT, PROMPT), completion=lengths, quantum=QUANTUM)
    layout = Cluster(Generation(model(name), DEVICE, degree), training(name, degree), replicas, "ddma")
    batch = Batch(SAMPLES // GROUP, GROUP, LONGEST // QUANTUM, workload)
    generation = Pipelines(layout.costs(QUANTUM), replicas, best.generate_batch, batch)
    return train_s + generation.generation_s


def rows() -> list[Row]:
    completion, rest_s = calibrate()
    table = []
    for name, (_, fast_s, slow_s, _) in TABLE.items():
        fast = asynchronous_s(name, completion) + rest_s
        slow = synchronous_s(name, completion) + rest_s
        table.append(Row("llamarl", f"{name}: asynchronous step", fast_s, fast, "s", name in FITTED))
        table.append(Row("llamarl", f"{name}: synchronous step", slow_s, slow, "s"))
        table.append(Row("llamarl", f"{name}: speed-up", slow_s / fast_s, slow / fast, "x"))
    return table


def calibrate() -> tuple[float, float]:
    """Mean completion and model-independent seconds that give the two fitted rows exactly."""
    small, large = FITTED

    def apart(completion: float) -> float:
        return asynchronous_s(large, completion) - asynchronous_s(small, completion)

    completion = bisect(apart, TABLE[large][1] - TABLE[small][1], 50.0, 8000.0)
    return completion, TABLE[small][1] - asynchronous_s(small, completion)


def bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a rising function has the value `target`."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
