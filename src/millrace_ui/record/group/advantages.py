"""The advantages of a trained group, computed again: a ledger keeps rewards, and no advantage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from millrace.algorithms.build import build
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.controller.state.groups import make_batch
from millrace.core.errors import MillraceError
from millrace.core.types import Group, Trajectory
from millrace.trainer.batch.flat_batch import flatten


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`by_token`: of each trained trajectory, by its id, the advantage of each token. `masked`: ids of
    trajectories that were in the batch, and whose tokens the algorithm left out of the loss. `unknown`: why
    there is none, in words."""

    by_token: dict[int, list[float]] = field(default_factory=dict)
    masked: frozenset[int] = frozenset()
    unknown: str = ""

    def of(self, one: Trajectory) -> list[float]:
        """Its advantage, or one of each turn if they differ. Empty: it has none."""
        values = self.by_token.get(one.trajectory_id)
        if values is None:
            return []
        turns = [values[start] for start, _, sampled in one.columns.turns() if sampled]
        return turns[:1] if len(set(turns)) == 1 else turns

    @property
    def largest(self) -> float:
        """The size of the largest advantage of the group."""
        sizes = (abs(value) for values in self.by_token.values() for value in values)
        return max(sizes, default=0.0)


NO_ADVANTAGES = GroupAdvantages()


def advantages_of(group: Group, config: Config) -> GroupAdvantages:
    """Those that the trainer gave the group's tokens: the same code, with the same rewards and tokens. The
    algorithm of a run never changes, so they are exact; in other cases there are none."""
    version = max((m.trained_version for m in group.members if m.trained_version is not None), default=None)
    if version is None:
        return GroupAdvantages(unknown="No version trained on this group, so it has no advantages.")
    if why := _not_from_rewards(config):
        return GroupAdvantages(unknown=why)
    members = [member for member in group.members if member.trained_version == version]
    batch = make_batch(version - 1, [replace(group, members=members)])
    try:
        flat = flatten(batch, build(config.algorithm), max_tokens=config.completion_tokens_max, minibatches=1)
    except MillraceError as error:
        return GroupAdvantages(unknown=f"The advantages cannot be computed: {error}")
    (trained,) = batch.groups
    ids = [sequence.trajectory_id for sequence in trained.sequences]
    by_token = np.split(flat.advantages_C, np.cumsum([len(one.columns) for one in trained.sequences])[:-1])
    masked = frozenset(one for one, num in zip(ids, flat.trained_S, strict=True) if num == 0)
    pairs = zip(ids, by_token, strict=True)
    return GroupAdvantages({one: values.tolist() for one, values in pairs if one not in masked}, masked)


def _not_from_rewards(config: Config) -> str:
    """Why the group's rewards do not tell its advantages, in words; empty: they do."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return "The advantages are not recorded: the run's algorithm is a function, which only a run calls."
    needs = {
        "the values of a critic": algorithm.baseline == "value",
        "a teacher's log-probs": algorithm.teacher is not None,
        "the KL penalty of each reward": algorithm.kl > 0 and algorithm.kl_in == "reward",
        "all other groups of the batch": algorithm.scale == "batch",
    }
    missing = [what for what, needed in needs.items() if needed]
    if not missing:
        return ""
    return f"The advantages are not recorded. To compute them again needs {' and '.join(missing)}."
