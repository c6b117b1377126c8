"""The input of every decision. Plain data, made by the controller; no clock, no I/O.

Words: a group's *birth* is the oldest version among its tokens, or the version that its replica serves if the
group has no tokens yet. A group that is trained at trainer version k has staleness k - birth. So under a
bound S its *deadline* is birth + S: the last trainer version at which it may be taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import msgspec


class GroupView(msgspec.Struct, frozen=True):
    """A live group. `ready_rank` orders groups by the time at which they became ready; None: not yet."""

    group_id: int
    birth: int
    ready_rank: int | None = None

    @property
    def ready(self) -> bool:
        return self.ready_rank is not None


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica as the controller sees it. Trajectory counts include commands on their way."""

    replica_id: str
    version: int  # being served; -1: none yet
    busy: bool = False  # gets no order: it pulls or moves now, or will pull first (see `Schedule.admit`)
    pulling_version: int = -1  # the version of a pull under way; -1: none
    running: int = 0
    waiting: int = 0
    slots: int = 1
    kv_used_tokens: int = 0
    kv_used_tokens_previous: int = 0  # at the previous repack tick
    kv_capacity_tokens: int = 1
    steps_since_swap: int = 0
    groups_since_swap: int = 0  # groups started here under the present version
    pullable: tuple[int, ...] | None = None  # versions that its host holds; None: `View.pullable`
    fetching_version: int = -1  # the version that its host is about to get from another host; -1: none
    staging_version: int = -1  # the version that the trainer has just copied to its host; -1: none

    @property
    def load(self) -> int:
        return self.running + self.waiting

    @property
    def serving(self) -> bool:
        return self.version >= 0 and not self.busy

    @property
    def version_next(self) -> int:
        """The version that the replica serves once it is no longer busy."""
        return self.pulling_version if self.pulling_version >= 0 else self.version


def births_of(groups: Iterable[GroupView]) -> list[tuple[int, int]]:
    """(birth, how many of `groups` have it), ascending."""
    return sorted(Counter([group.birth for group in groups]).items())


class QueuedView(msgspec.Struct, frozen=True):
    """A trajectory that no replica works on. `version` is that of its newest token (None: it has none),
    `birth` that of its group. Between two turns `version` is None, and `birth` that of the last turn, which
    the replica `home` sampled; empty: that replica is gone."""

    version: int | None
    birth: int
    home: str = ""
    tokens: int = 0  # so far, of all its turns


class View(msgspec.Struct, frozen=True, dict=True):
    """The run at one moment.

    `version` is the version at which the next batch will be trained, so it counts the batch that is taken,
    applied or not, and batches to be repeated after a crash. The groups of the taken batch are not in
    `groups`. `steps_left` counts the versions after `version`.
    """

    version: int
    newest: int  # newest version that any host holds; -1: none
    pullable: tuple[int, ...]  # all versions that some replica can pull, oldest first
    steps_left: int  # versions still to make
    batch_groups: int
    group_size: int
    max_sequence_tokens: int  # prompt + completion at most: what a trajectory may need in KV
    groups: tuple[GroupView, ...]  # live groups in admission order
    replicas: tuple[ReplicaView, ...]  # those that are up, in a fixed order
    versions_queued: tuple[int, ...] = ()  # of the newest tokens of queued trajectories, ascending
    reached: int = -1  # the highest id of a group that was ever trained: the position in the data stream
    group_duration_batches: float = (
        1.0  # batches that a trainer without waits trains while one group is generated
    )
    staleness: float | None = None  # mean of recently trained tokens; None: too little was trained
    num_replicas: int = 0  # of the run, up or not; at least those that are up
    screen_samples: int = 0  # trajectories with which a group starts; 0: all of it
    redundant_groups: int = 0  # live groups that need not be trained in time
    parked: int = 0  # groups that begin again in a long round (`ahead.long_round`); they are not live
    returned: int = 0  # live groups that have begun again so

    @cached_property
    def births(self) -> list[tuple[int, int]]:
        """Of the live groups. Counted once: every round of decisions needs it several times."""
        return births_of(self.groups)

    @property
    def start_size(self) -> int:
        """Trajectories with which a group starts."""
        return self.screen_samples or self.group_size

    @property
    def fleet(self) -> int:
        """Replicas that share the work, at least 1."""
        return max(1, self.num_replicas, len(self.replicas))

    def pullable_by(self, replica: ReplicaView) -> tuple[int, ...]:
        """What `replica` can pull: the versions of its host, oldest first."""
        return self.pullable if replica.pullable is None else replica.pullable

    def newest_for(self, replica: ReplicaView) -> int:
        """The newest version that `replica` can pull; -1: none."""
        return self.newest if replica.pullable is None else max(replica.pullable, default=-1)

    def behind(self, replica: ReplicaView) -> bool:
        """Whether `replica` can pull a newer version than it serves, now or in a moment."""
        return replica.version < max(self.newest_for(replica), replica.staging_version)


class RefreshOrder(msgspec.Struct, frozen=True):
    """Take `replica_id` to `version`. `discard`: its trajectories restart from their prompts."""

    replica_id: str
    version: int
    discard: bool = False


class RepackOrder(msgspec.Struct, frozen=True):
    """Empty `source`: its trajectories go to replicas of the same version, `shares` of them to each."""

    source: str
    shares: dict[str, int]
