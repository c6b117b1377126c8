"""A run's configuration, table by table. Frozen once loaded.

Alternatives are tagged unions on `kind`. `None` means off, in TOML `"none"`. Derived numbers are properties.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from millrace.config.tables.algorithms import Algorithm, PolicyGradient
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.generation import Rollout, SamplingConfig
from millrace.config.tables.operation import Checkpoints, LocalHosts, Observe, Runtime, Supervision, Weights
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
from millrace.config.tables.task import (
    EnvironmentRewardSection,
    FileTaskSection,
    FunctionTaskSection,
    GymTaskSection,
    HubTaskSection,
    MixtureTaskSection,
    Reward,
    Selection,
    Task,
)
from millrace.config.tables.training import Adapter, BatchShape, Model, Optimizer, TrainerSection


class Keys(Section):
    """The tables of a run, and numbers that follow from them."""

    steps: Count = 100
    """Batches that are trained on. Each makes one version, by `batch.minibatches` x `batch.epochs` optimizer
    steps."""
    seed: Seed = 0
    """Seed of everything random in the run: prompt order and sampling noise."""
    allow: tuple[Literal["uncorrected", "cut_sampling", "false_positives"], ...] = ()
    """What is otherwise refused at the start. `"uncorrected"`: tokens of older policies without a correction.
    `"cut_sampling"`: `top_p`, `top_k` or `min_p`, and the trainer has no `sampling.token_masks`.
    `"false_positives"`: a family of reasoning-gym whose scorer accepts a wrong answer. See
    reports/gym-families.md."""
    model: Model
    task: GymTaskSection | FileTaskSection | HubTaskSection | FunctionTaskSection | MixtureTaskSection = (
        Field(discriminator="kind")
    )
    reward: Reward
    batch: BatchShape = BatchShape()
    selection: Selection | None = Field(default=None, discriminator="kind")
    """Which rows rest because the model always or never solves them. `"none"`: every prompt is taken. See
    docs/data.md."""
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
    it trains, by a process of its own. See docs/evaluation.md."""

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
    def own_prompts(self) -> bool:
        """Each trajectory has a prompt of its own: the first request of its agent."""
        return isinstance(self.reward, EnvironmentRewardSection) and self.reward.agent is not None

    @property
    def keeps_kv(self) -> bool:
        """A replica keeps keys and values of a trajectory that ends, because another turn may follow."""
        return self.rollout.keep_kv and isinstance(self.reward, EnvironmentRewardSection)

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
    def policy_gradient(self) -> PolicyGradient | None:
        """None: the algorithm is a function of the user's own, of which nothing is known."""
        return self.algorithm if isinstance(self.algorithm, PolicyGradient) else None

    @property
    def teacher(self) -> str | None:
        """The directory of the model that the run distils."""
        return None if self.policy_gradient is None else self.policy_gradient.teacher

    @property
    def reference_apart(self) -> bool:
        """The reference is in a process of its own."""
        a = self.policy_gradient
        return a is not None and a.reference == "replica" and a.kl > 0

    @property
    def relay_slots(self) -> int:
        """Versions that the relay holds whole where there is room: as `relay_versions`, at most 8."""
        return min(8, self.relay_versions) if self.weights.slots is None else self.weights.slots

    @property
    def relay_versions(self) -> int:
        """Versions of use in a relay: every one that trajectories are of, one being written, one spare."""
        bound = self.staleness_bound
        return 8 if bound is None else min(64, bound + 3)

    def of_evaluation(self, evaluation: EvaluationSection) -> Self:
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
    def by_part(self) -> dict[str, Self]:
        """The configuration of each part of a mixture, by its name: its task and its reward. Any other run is
        one part, with an empty name."""
        if not isinstance(self.task, MixtureTaskSection):
            return {"": self}
        own = {part.name: part.reward or self.reward for part in self.task.parts}
        return {
            part.name: self.model_copy(
                update={"task": part.task, "reward": own[part.name].model_copy(update=self.reward.limits)}
            )
            for part in self.task.parts
        }
