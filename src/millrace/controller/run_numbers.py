"""The numbers of a run that its state needs, from the configuration and the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.schema import Config
from millrace.core.types import Sampling
from millrace.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """`group_size`: trajectories that a group has, with the redundant ones."""

    steps: int
    batch_groups: int
    group_size: int
    slots: int
    max_sequence_tokens: int
    sampling: Sampling
    seed: int
    attempts: int
    episode_tokens: int = 0  # most sampled tokens, where an environment answers; 0: none does
    resampled_max: int = 0  # groups without signal that may be replaced between two steps
    screen_samples: int = 0  # trajectories with which a group starts; 0: all of them
    redundant_samples: int = 0  # trajectories that a group has and a batch does not need
    redundant_groups: int = 0  # the same of groups
    one_version: bool = False  # all turns of a trajectory have one version
    own_prompts: bool = False  # each episode begins for its trajectory, and may have a prompt of its own

    @classmethod
    def of(cls, config: Config, schedule: Schedule) -> RunNumbers:
        a = config.policy_gradient
        return cls(
            steps=config.steps,
            batch_groups=config.batch.prompts,
            group_size=config.batch.group_size + schedule.redundant_samples,
            screen_samples=config.batch.screen_samples,
            slots=config.rollout.slots,
            max_sequence_tokens=config.rollout.max_sequence_tokens,
            sampling=Sampling(**dict(config.sampling)),
            seed=config.seed,
            attempts=config.supervision.attempts,
            episode_tokens=config.episode_tokens,
            resampled_max=(a.resample if a is not None else 0) * config.batch.prompts,
            redundant_samples=schedule.redundant_samples,
            redundant_groups=schedule.redundant_groups,
            one_version=schedule.one_version,
            own_prompts=config.own_prompts,
        )

    @property
    def of_lease(self) -> tuple[Sampling, int, int]:
        """What a lease needs of them."""
        return self.sampling, self.seed, self.episode_tokens

    @property
    def samples(self) -> int:
        """Scored trajectories with which a group is complete."""
        return self.group_size - self.redundant_samples
