"""Schedules of a fixed staleness, to measure what staleness and unfair batches cost in learning. One replica.

Rounds of `batches` batches are generated under one version each. The replica takes version
`batches * r - ahead` for round r, and the trainer waits until the replica has it. So which weights sampled a
batch does not depend on how fast anything is. With one batch a round every token has staleness `ahead`, after
the first `ahead` steps.

    schedule.path = "lockstep:fixed"          # staleness exactly `schedule.staleness_max`
    schedule.path = "lockstep:in_order"       # rounds of two batches, in the order of admission
    schedule.path = "lockstep:first_ready"    # the same rounds, first ready, first trained
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.schema import Config
from millrace.schedule import ReplicaView, Schedule, View
from millrace.schedule.route import LeastLoaded
from millrace.schedule.take import FirstReady
from millrace.schedule.view import GroupView


@dataclass(frozen=True)
class Rounds:
    """Admit and refresh: a round of groups under one version, then the version of the next round."""

    batches: int
    ahead: int
    batch_groups: int

    discards = False

    def version_after(self, version: int) -> int:
        """The version of the next round: of the first round r with `batches * r > version + ahead`."""
        return (version + self.ahead) // self.batches * self.batches + self.batches - self.ahead

    def groups(self, version: int) -> int:
        """What is generated under `version`; under 0, all rounds that would need a version below."""
        rounds = self.ahead // self.batches + 1 if version == 0 else 1
        return rounds * self.batches * self.batch_groups

    def room(self, view: View, replica: ReplicaView) -> int:
        return self.groups(replica.version) - replica.groups_since_swap

    def due(self, view: View, replica: ReplicaView) -> bool:
        done = replica.load == 0 and replica.groups_since_swap >= self.groups(replica.version)
        return done and view.newest >= self.version_after(replica.version)

    def describe(self) -> str:
        return f"rounds of {self.batches} batches under one version, {self.ahead} versions ahead"


@dataclass(frozen=True)
class AsAdmitted:
    """Take: in the order of admission."""

    def ranked(self, view: View, ready: list[GroupView]) -> list[GroupView]:
        return sorted(ready, key=lambda group: group.group_id)

    def describe(self) -> str:
        return "in the order of admission"


class Lockstep(Schedule):
    """The trainer waits for the groups that come first, and until the replica has its round's version."""

    def take(self, view: View) -> list[int] | None:
        first = sorted(group.group_id for group in view.groups)[: view.batch_groups]
        unready = {group.group_id for group in view.groups if not group.ready}
        if isinstance(self.take_rule, AsAdmitted) and unready.intersection(first):
            return None
        all_live = len(view.groups) >= view.steps_left * view.batch_groups
        return None if not all_live and self._overtakes(view) else super().take(view)

    def _overtakes(self, view: View) -> bool:
        """Whether a step now would make a version newer than the one that the replica has to take next."""
        rounds = self.admit_rule
        assert isinstance(rounds, Rounds)
        return any(view.version >= rounds.version_after(replica.version_next) for replica in view.replicas)


def fixed(config: Config) -> Schedule:
    return _lockstep(config, batches=1, in_order=True)


def in_order(config: Config) -> Schedule:
    return _lockstep(config, batches=2, in_order=True)


def first_ready(config: Config) -> Schedule:
    return _lockstep(config, batches=2, in_order=False)


def _lockstep(config: Config, *, batches: int, in_order: bool) -> Schedule:
    bound = config.staleness_bound
    assert bound is not None and bound >= batches - 1 and config.rollout.replicas == 1, config.schedule
    rounds = Rounds(batches, bound - (batches - 1), config.batch.prompts)
    return Lockstep(
        kind="lockstep",
        staleness_max=bound,
        mixes_versions=False,
        admit_rule=rounds,
        route_rule=LeastLoaded(),
        refresh_rule=rounds,
        take_rule=AsAdmitted() if in_order else FirstReady(),
    )
