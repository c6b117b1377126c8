"""The controller's record of a live group, and the batch that ready groups make."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.types import Batch, Finish, Group, State, TrainGroup, TrainSequence, Trajectory
from millrace.schedule.view import GroupView


def members_of(group_id: int, group_size: int) -> range:
    """The trajectories of a group."""
    return range(group_id * group_size, (group_id + 1) * group_size)


class GroupRecord:
    """A live group, and its view for decisions. `birth` never decreases; see `schedule.view`."""

    __slots__ = ("group", "started_s", "unstarted", "view")

    def __init__(self, group: Group, birth: int, samples: int, started_s: float | None = None) -> None:
        """`started_s` None: the group started in an earlier session. The members after the first `samples`
        are held back (`schedule.admit`), unless one of them has started; 0: none is."""
        self.group, self.view, self.started_s = group, GroupView(group.group_id, birth), started_s
        rest = group.members[samples:] if samples else []
        self.unstarted = rest if all(m.state is State.QUEUED and not m.lease for m in rest) else []

    @property
    def started(self) -> list[Trajectory]:
        """The members that are not held back."""
        return self.group.members[: len(self.group.members) - len(self.unstarted)]

    @property
    def birth(self) -> int:
        return self.view.birth

    @birth.setter
    def birth(self, birth: int) -> None:
        if birth != self.view.birth:
            self.view = GroupView(self.view.group_id, birth, self.view.ready_rank)

    @property
    def ready_rank(self) -> int | None:
        return self.view.ready_rank

    @ready_rank.setter
    def ready_rank(self, rank: int) -> None:
        self.view = GroupView(self.view.group_id, self.view.birth, rank)


def make_batch(version: int, groups: Iterable[Group]) -> Batch:
    """The batch that takes the trainer from `version` to `version + 1`: the scored members of `groups`."""
    return Batch(version, [TrainGroup(g.group_id, g.prompt, _sequences(g)) for g in groups])


def _sequences(group: Group) -> list[TrainSequence]:
    return [
        TrainSequence(
            trajectory_id=m.trajectory_id,
            columns=m.columns.without_top_logprobs(),
            reward=m.reward,
            truncated=m.finish is Finish.LENGTH,
            mask=m.columns.sampled(),
            metrics=m.metrics,
        )
        for m in group.members
        if m.state in (State.BUFFERED, State.TRAINED) and m.reward is not None
    ]
