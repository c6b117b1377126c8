"""A run's configuration, table by table. Frozen once loaded.

Alternatives are tagged unions on `kind`. `None` means off, in TOML `"none"`. Derived numbers are properties.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from millrace.config.algorithms import GRPO, Algorithm
from millrace.config.environment import Reward, Task
from millrace.config.generation import Rollout, SamplingConfig
from millrace.config.operation import Checkpoints, Observe, Supervision, Weights
from millrace.config.runtime import LocalHosts, Runtime
from millrace.config.schedules import (
    RLAX,
    AReaL,
    FunctionSchedule,
    Laminar,
    LlamaRL,
    Millrace,
    RLBoost,
    Schedule,
    Synchronous,
)
from millrace.config.section import Count, Section, Seed
from millrace.config.training import Adapter, BatchShape, Model, Optimizer, Trainer


class Config(Section):
    """A run."""

    steps: Count = 100
    """Optimizer steps."""
    seed: Seed = 0
    """Seed of everything random in the run: prompt order and sampling noise."""
    allow: tuple[Literal["uncorrected", "cut_sampling"], ...] = ()
    """What is otherwise refused at the start. `"uncorrected"`: tokens of older policies without a correction.
    `"cut_sampling"`: `top_p`, `top_k` or `min_p`, which the trainer knows nothing of."""
    model: Model
    task: Task
    reward: Reward
    batch: BatchShape = BatchShape()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: Algorithm = GRPO()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter = Adapter()
    trainer: Trainer = Trainer()
    schedule: Schedule = Millrace()
    rollout: Rollout = Rollout()
    weights: Weights = Weights()
    runtime: Runtime = LocalHosts()
    supervision: Supervision = Supervision()
    checkpoints: Checkpoints = Checkpoints()
    observe: Observe = Observe()

    @property
    def trajectories_per_step(self) -> int:
        return self.batch.prompts * self.batch.group_size

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness that the schedule admits; None: no bound."""
        schedule = self.schedule
        match schedule:
            case Synchronous():
                return 0
            case LlamaRL():
                return schedule.lag
            case AReaL():
                return schedule.eta
            case RLAX():
                return schedule.acceptance_staleness
            case Laminar() | Millrace() | RLBoost() | FunctionSchedule():
                return schedule.staleness_max

    @property
    def relay_slots(self) -> int:
        """Versions that the relay holds where there is room: every version in use, one being written, one
        spare."""
        if self.weights.slots is not None:
            return self.weights.slots
        bound = self.staleness_bound
        return 8 if bound is None else min(8, bound + 3)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.sampling.max_tokens >= self.rollout.max_sequence_tokens:
            raise ValueError(
                f"`sampling.max_tokens` ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"`rollout.max_sequence_tokens` ({self.rollout.max_sequence_tokens})"
            )
        if self.batch.minibatches > self.batch.prompts:
            raise ValueError(
                f"`batch.minibatches` ({self.batch.minibatches}) must be at most `batch.prompts` "
                f"({self.batch.prompts}): a part has whole groups"
            )
        keep = getattr(self.algorithm, "keep", None)
        if keep is not None and keep >= self.batch.group_size:
            raise ValueError(
                f"`algorithm.keep` ({keep}) must be less than `batch.group_size` ({self.batch.group_size}): "
                "nothing would be left out"
            )
        if self.optimizer.rule == "muon" and (self.trainer.ranks > 1 or self.trainer.offload):
            raise ValueError(
                '`optimizer.rule` ("muon") needs whole matrices: a trainer of one rank, not '
                f"{self.trainer.ranks}, and without `trainer.offload`"
            )
        if self.adapter.rank is not None and self.trainer.tensor > 1:
            raise ValueError(
                f"`adapter.rank` ({self.adapter.rank}) needs whole matrices, and `trainer.tensor` "
                f"({self.trainer.tensor}) divides them. Set it to 1, and use `trainer.shard`"
            )
        if self.rollout.python is not None and self.runtime.kind == "ray":
            raise ValueError(
                f"`rollout.python` ({self.rollout.python}) starts replicas of one machine. On Ray every "
                "worker runs in the Python of its node: install the engine there"
            )
        if self.reward.kind == "gym" and self.task.kind != "gym":
            raise ValueError('`reward.kind` "gym" needs `task.kind` "gym": use "exact", "math" or "function"')
        if self.reward.kind in ("exact", "math") and self.task.kind != "gym" and self.task.answer is None:
            raise ValueError(
                f'`reward.kind` "{self.reward.kind}" compares with an answer, and `task.answer` is "none": '
                "name the column with the answer"
            )
        if self.sampling.temperature < 0.01 or self.sampling.top_k == 1:
            raise ValueError(
                f"`sampling.temperature` ({self.sampling.temperature}) must be 0.01 or more in training, and "
                f"`sampling.top_k` ({self.sampling.top_k}) 0 or at least 2: greedy trajectories are all equal"
            )
        if self.rollout.exact and not self.rollout.recompute:
            raise ValueError(
                "`rollout.exact` (true) needs `rollout.recompute` (true): with keys and values of an earlier "
                "version, a trajectory goes on otherwise than after a move"
            )
        return self
