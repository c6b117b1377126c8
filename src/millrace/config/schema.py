"""A run's configuration, table by table. Frozen once loaded.

Alternatives are tagged unions on `kind`. `None` means off, in TOML `"none"`. Derived numbers are properties.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from millrace.config.colocated import why_not_colocated
from millrace.config.jax_backend import why_not_jax
from millrace.config.native_adapters import why_not_native
from millrace.config.tables.algorithms import Algorithm, PolicyGradient
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.generation import Rollout, SamplingConfig
from millrace.config.tables.mixture import MixtureTaskSection
from millrace.config.tables.operation import Checkpoints, Observe, Supervision, Weights
from millrace.config.tables.reward_limits import RewardLimits
from millrace.config.tables.runtime import LocalHosts, Runtime
from millrace.config.tables.schedules import (
    RLAX,
    AReaL,
    LlamaRL,
    Millrace,
    RollFlash,
    RollPacker,
    Schedule,
    Synchronous,
)
from millrace.config.tables.section import Count, Section, Seed
from millrace.config.tables.selection import Selection
from millrace.config.tables.task import (
    EnvironmentRewardSection,
    FileTaskSection,
    FunctionTaskSection,
    GymTaskSection,
    HubTaskSection,
    OneReward,
    Reward,
    Task,
    members_of,
)
from millrace.config.tables.training import Adapter, BatchShape, Model, Optimizer, TrainerSection


class Config(Section):
    """A run."""

    steps: Count = 100
    """Batches that are trained on. Each makes one version, by `batch.minibatches` x `batch.epochs` optimizer
    steps."""
    seed: Seed = 0
    """Seed of everything random in the run: prompt order and sampling noise."""
    allow: tuple[Literal["uncorrected", "cut_sampling", "false_positives"], ...] = ()
    """What is otherwise refused at the start. `"uncorrected"`: tokens of older policies without a correction.
    `"cut_sampling"`: `top_p`, `top_k` or `min_p`, and the trainer has no `sampling.token_masks`.
    `"false_positives"`: a family of reasoning-gym whose scorer accepts a wrong answer. See
    docs/gym-families.md."""
    model: Model
    task: GymTaskSection | FileTaskSection | HubTaskSection | FunctionTaskSection | MixtureTaskSection = (
        Field(discriminator="kind")
    )
    reward: Reward
    batch: BatchShape = BatchShape()
    selection: Selection | None = Field(default=None, discriminator="kind")
    """Which rows rest because the model always or never solves them. `"none"`: every prompt is taken. See
    docs/selection.md."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: Algorithm = PolicyGradient()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter = Adapter()
    trainer: TrainerSection = TrainerSection()
    schedule: Schedule = Millrace()
    rollout: Rollout = Rollout()
    weights: Weights = Weights()
    runtime: Runtime = LocalHosts()
    supervision: Supervision = Supervision()
    checkpoints: Checkpoints = Checkpoints()
    observe: Observe = Observe()
    evaluations: tuple[EvaluationSection, ...] = ()
    """`evaluations` is a list of tables, each headed `[[evaluations]]`: what is measured of the model while
    it trains, by a process of its own. See docs/rewards.md."""

    @property
    def trajectories_per_step(self) -> int:
        return self.batch.prompts * self.batch.group_size

    @property
    def episode_tokens(self) -> int:
        """The most tokens that all turns of a trajectory sample together; 0: no environment answers."""
        reward = self.reward
        if not isinstance(reward, EnvironmentRewardSection):
            return 0
        return reward.episode_tokens or reward.turns * self.sampling.max_tokens

    @property
    def completion_tokens_max(self) -> int:
        """Most tokens that are sampled of one trajectory, in all of its turns."""
        reward, most = self.reward, self.rollout.max_sequence_tokens
        if not isinstance(reward, EnvironmentRewardSection):
            return min(self.sampling.max_tokens, most)
        return min(reward.turns * self.sampling.max_tokens, reward.episode_tokens or most, most)

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness that the schedule admits; None: no bound."""
        schedule = self.schedule
        match schedule:
            case Synchronous() | RollPacker():
                return 0
            case LlamaRL():
                return schedule.lag
            case AReaL():
                return schedule.eta
            case RLAX():
                return schedule.acceptance_staleness
            case RollFlash():
                return schedule.alpha
            case _:
                return schedule.staleness_max

    @property
    def reference_apart(self) -> bool:
        """The reference is in a process of its own."""
        return getattr(self.algorithm, "reference", "") == "replica" and getattr(self.algorithm, "kl", 0) > 0

    @property
    def relay_slots(self) -> int:
        """Versions that the relay holds whole where there is room: as `relay_versions`, at most 8."""
        return min(8, self.relay_versions) if self.weights.slots is None else self.weights.slots

    @property
    def relay_versions(self) -> int:
        """Versions of use in a relay: every one that trajectories are of, one being written, one spare."""
        bound = self.staleness_bound
        return 8 if bound is None else min(64, bound + 3)

    def of_evaluation(self, evaluation: EvaluationSection) -> Config:
        """The configuration that an evaluation's prompts and rewards are made with."""
        task = evaluation.task or self.task
        if evaluation.task is None and isinstance(task, GymTaskSection):
            task = task.model_copy(update={"data_seed": task.data_seed + 1})
        return self.model_copy(
            update={"task": task, "reward": evaluation.reward or self.reward, "evaluations": ()}
        )

    @property
    def one_task(self) -> Task:
        """The task of a run without a mixture, or of a part."""
        assert not isinstance(self.task, MixtureTaskSection), self.task
        return self.task

    @property
    def by_part(self) -> dict[str, Config]:
        """The configuration of each part of a mixture, by its name: its task and its reward. Any other run is
        one part, with an empty name."""
        if not isinstance(self.task, MixtureTaskSection):
            return {"": self}
        limits = {key: getattr(self.reward, key) for key in RewardLimits.model_fields}
        own = {part.name: part.reward or self.reward for part in self.task.parts}
        return {
            part.name: self.model_copy(
                update={"task": part.task, "reward": own[part.name].model_copy(update=limits)}
            )
            for part in self.task.parts
        }

    @model_validator(mode="after")
    def _evaluable(self) -> Config:
        names = [evaluation.name for evaluation in self.evaluations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"`evaluations`: {twice[0]!r} is the name of two: give each its own")
        if self.evaluations and self.rollout.servers:
            raise ValueError(
                "`evaluations` need a replica that the run starts itself, and `rollout.servers` names "
                "servers: leave one of them out, and evaluate checkpoints with `millrace eval`"
            )
        for evaluation in self.evaluations:
            self._check_evaluation(evaluation, f"`evaluations` ({evaluation.name})")
        return self

    def _check_evaluation(self, evaluation: EvaluationSection, which: str) -> None:
        own_rows = isinstance(self.task, GymTaskSection) and evaluation.canary != "rows"
        if evaluation.task is None and not own_rows and evaluation.canary != "wrong-gold":
            raise ValueError(
                f"{which} needs a `task` of its own: the rows of `task` are trained on.\n"
                '  Name a file that training does not read: task = { kind = "file", path = "..." }'
            )
        whole = self.of_evaluation(evaluation)
        _check_reward(whole.one_task, whole.reward, f"{which}: ")
        least = {"greedy": 0, "majority": 2}.get(evaluation.by, 1)
        if evaluation.samples < least:
            raise ValueError(
                f'{which}: `by` ("{evaluation.by}") needs `samples` of at least {least}, '
                f"not {evaluation.samples}"
            )
        if evaluation.by == "majority" and whole.reward.kind == "environment":
            raise ValueError(
                f'{which}: `by` ("majority") counts answers, and an episode has none: use "pass"'
            )
        if evaluation.canary == "wrong-gold" and whole.reward.kind == "environment":
            raise ValueError(
                f"{which}: an environment with the gold of another row answers by it, and pays for what it "
                'showed.\n  Set `canary` to "rows", with a `task` of rows that deserve no reward'
            )
        judges = evaluation.keep_best or evaluation.patience is not None
        if evaluation.canary and (judges or evaluation.samples == 0 or evaluation.correct_at <= 0):
            raise ValueError(
                f"{which}: a canary must earn nothing, so no version is its best: leave `keep_best` and "
                "`patience` out, and set `samples` to at least 1 and `correct_at` above 0"
            )
        if evaluation.keep_best and evaluation.every % self.checkpoints.every:
            raise ValueError(
                f"{which}: with `keep_best`, `every` ({evaluation.every}) must be a multiple of "
                f"`checkpoints.every` ({self.checkpoints.every}): only those versions have a checkpoint"
            )

    @model_validator(mode="after")
    def _screens(self) -> Config:
        a, redundant = self.algorithm, getattr(self.schedule, "redundant_samples", 0)
        if self.batch.screen_samples and redundant:
            raise ValueError(
                f"`batch.screen_samples` ({self.batch.screen_samples}) waits for the first trajectories of a "
                f"group, and `schedule.redundant_samples` ({redundant}) for none in particular.\n"
                "  Set one of them to 0"
            )
        if self.batch.screen_samples and isinstance(a, PolicyGradient) and a.learns_from_equal_rewards:
            raise ValueError(
                f"`batch.screen_samples` ({self.batch.screen_samples}) ends groups whose first rewards are "
                f"all equal, and `algorithm` ({a.kind}) learns from them: by `baseline` ({a.baseline}), "
                f"`teacher` ({a.teacher}), `turn_discount` ({a.turn_discount}) or `sequence_share` "
                f"({a.sequence_share}).\n  Set it to 0"
            )
        return self

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
        if self.adapter.rank is not None and self.trainer.tensor > 1 and self.trainer.backend == "torch":
            raise ValueError(
                f"`adapter.rank` ({self.adapter.rank}) needs whole matrices, and `trainer.tensor` "
                f"({self.trainer.tensor}) divides them.\n  Set `trainer.tensor` to 1, and use `trainer.shard`"
            )
        if self.trainer.backend == "jax" and (why := why_not_jax(self)):
            raise ValueError(f'`trainer.backend` ("jax") {why}')
        if self.reference_apart and (why := self._reference_elsewhere()):
            raise ValueError(f'`algorithm.reference` ("replica") {why}.\n  Set it to "trainer"')
        self._check_replicas()
        if self.rollout.python is not None and self.runtime.kind == "ray":
            raise ValueError(
                f"`rollout.python` ({self.rollout.python}) starts replicas of one machine. On Ray every "
                "worker runs in the Python of its node: install the engine there"
            )
        if ":" in self.model.device and self.runtime.kind == "ray":
            raise ValueError(
                f"`model.device` ({self.model.device!r}) names a GPU of one machine, and Ray has several.\n"
                '  Set it to "cuda", and start Ray on each node with the GPUs that the run may use'
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

    @model_validator(mode="after")
    def _prompts_make_sense(self) -> Config:
        for name, part in self.by_part.items():
            if name and part.reward.kind == "environment":
                raise ValueError(
                    f'`task.parts` ({name}): `reward.kind` "environment" is for a run of one task'
                )
            _check_reward(part.one_task, part.reward, f"`task.parts` ({name}): " if name else "")
        ends = {"algorithm.resample": getattr(self.algorithm, "resample", 0)}
        ends["batch.screen_samples"] = self.batch.screen_samples
        for key, value in ends.items():
            if self.selection is not None and value:
                raise ValueError(
                    f"`selection` learns from trained groups, and `{key}` ({value}) ends groups without "
                    f'signal before.\n  Set `{key}` to 0, or `selection` to "none"'
                )
        return self

    def _check_replicas(self) -> None:
        for key, why_not in (("colocated", why_not_colocated), ("native_adapters", why_not_native)):
            if getattr(self.rollout, key) and (why := why_not(self)):
                raise ValueError(f"`rollout.{key}` (true) {why}")

    def _reference_elsewhere(self) -> str:
        """Why a process of its own is not for the reference; empty: it is."""
        rollout, rank = self.rollout, self.adapter.rank
        if rollout.servers:
            return "takes the place of a replica, and `rollout.servers` names servers"
        if rollout.tensor > 1:
            return f"has one device, and with `rollout.tensor` ({rollout.tensor}) a replica has several"
        if rank is not None:
            return (
                f"is not needed: with `adapter.rank` ({rank}) the model without its adapter is the reference"
            )
        return ""


def _check_reward(task: Task, reward: Reward, which: str = "") -> None:
    for name, part in members_of(reward).items():
        _check_one(task, part, f"{which}`reward.members` ({name}): " if name else which)


def _check_one(task: Task, reward: OneReward, which: str) -> None:
    if reward.kind == "gym" and task.kind != "gym":
        raise ValueError(
            f'{which}`reward.kind` "gym" needs `task.kind` "gym": use "exact", "math" or "function"'
        )
    needs_answer = reward.kind in ("exact", "math") or (
        reward.kind == "judge" and (reward.show_answer or reward.mode == "pairwise")
    )
    if needs_answer and task.kind != "gym" and task.answer is None:
        raise ValueError(
            f'{which}`reward.kind` "{reward.kind}" compares with an answer, and `task.answer` is "none": '
            "name the column with the answer"
        )
