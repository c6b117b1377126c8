"""LlamaRL's two problems: the best step time of synchronous and of asynchronous RL, and the best split.

With B0 samples a step, G0 devices of M0 bytes, W0 bytes of weights, A_t activation and K_g KV bytes of a
sample, micro-batches b, model-parallel sizes m, and eta(b, m) seconds per sample of one copy:

    (6)  synchronous    min  (B0/G0) m (eta_t(b_t) + eta_g(b_g))
                        s.t. (4 W0 + A_t b_t) + (W0 + K_g b_g) <= m M0
    (7)  asynchronous   min  (B0/G0) max(eta_t(b_t) m_t / theta, eta_g(b_g) m_g / (1 - theta))
                        s.t. 4 W0 + A_t b_t <= m_t M0,   W0 + K_g b_g <= m_g M0

At the optimum of (7) both terms are equal: theta* = eta_t m_t / (eta_t m_t + eta_g m_g), and the step takes
(B0/G0) (eta_t m_t + eta_g m_g), each side at its own best b and m. No length variance is in it: that is the
simulator's part.

Source: LlamaRL, arXiv:2505.24034, section 6. Differs: eta may depend on m; tensor parallelism is not free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millrace.core.errors import ConfigError

Eta = Callable[[int, int], float]
"""(micro-batch or batch in flight, model-parallel size) -> seconds per sample of one copy."""

MODEL_PARALLEL = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Problem:
    """Sizes in bytes; `samples` is B0, `devices` G0. Batches beyond `batch_max` are not looked at."""

    samples: int
    devices: int
    memory: float
    weights: float
    activations: float
    kv: float
    train_s: Eta
    generate_s: Eta
    batch_max: int = 1024


@dataclass(frozen=True, slots=True)
class Side:
    """One side's best: `cost` is eta(b) m, device-seconds per sample."""

    batch: int
    model_parallel: int
    cost: float


@dataclass(frozen=True, slots=True)
class BestSynchronous:
    step_s: float
    train_batch: int
    generate_batch: int
    model_parallel: int


@dataclass(frozen=True, slots=True)
class BestAsynchronous:
    """`theta` is the trainer's share of the devices."""

    step_s: float
    theta: float
    train: Side
    generate: Side


def solve_synchronous(problem: Problem) -> BestSynchronous:
    """Problem (6). Raises: ConfigError: nothing fits."""
    best: BestSynchronous | None = None
    for m in _sizes(problem):
        for train_batch in _powers(_batch_that_fits(problem, m, 5 * problem.weights, problem.activations)):
            fixed = 5 * problem.weights + problem.activations * train_batch
            for generate_batch in _powers(_batch_that_fits(problem, m, fixed, problem.kv)):
                seconds = problem.train_s(train_batch, m) + problem.generate_s(generate_batch, m)
                step_s = problem.samples / problem.devices * m * seconds
                if best is None or step_s < best.step_s:
                    best = BestSynchronous(step_s, train_batch, generate_batch, m)
    if best is None:
        raise ConfigError(_nothing_fits(problem, "5 copies of the weights"))
    return best


def solve_asynchronous(problem: Problem) -> BestAsynchronous:
    """Problem (7). Raises: ConfigError: nothing fits."""
    train = _best_side(problem, 4 * problem.weights, problem.activations, problem.train_s)
    generate = _best_side(problem, problem.weights, problem.kv, problem.generate_s)
    if train is None or generate is None:
        raise ConfigError(_nothing_fits(problem, "the trainer's 4 copies of the weights"))
    theta = theta_star(train.cost, generate.cost)
    step_s = problem.samples / problem.devices * (train.cost + generate.cost)
    return BestAsynchronous(step_s, theta, train, generate)


def theta_star(train_cost: float, generate_cost: float) -> float:
    """The trainer's share at which both sides take equally long. Costs: device-seconds per sample, eta m."""
    return train_cost / (train_cost + generate_cost)


def _best_side(problem: Problem, fixed: float, per_sample: float, eta: Eta) -> Side | None:
    sides = (
        Side(batch, m, eta(batch, m) * m)
        for m in _sizes(problem)
        for batch in _powers(_batch_that_fits(problem, m, fixed, per_sample))
    )
    return min(sides, key=lambda side: side.cost, default=None)


def _batch_that_fits(problem: Problem, m: int, fixed: float, per_sample: float) -> int:
    room = m * problem.memory - fixed
    if room < 0:
        return 0
    return min(problem.batch_max, int(room / per_sample)) if per_sample > 0 else problem.batch_max


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most` itself; nothing where `most` is 0."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    if most:
        yield most


def _sizes(problem: Problem) -> list[int]:
    return [m for m in MODEL_PARALLEL if m <= problem.devices]


def _nothing_fits(problem: Problem, what: str) -> str:
    return (
        f"{problem.devices} devices of {problem.memory / 1e9:.0f} GB cannot hold {what} "
        f"({problem.weights / 1e9:.0f} GB each) with a single sample: take more devices or a smaller model"
    )
