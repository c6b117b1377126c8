"""The groups that wait for a long round."""

from __future__ import annotations

from collections.abc import Container, Iterable

from millrace.core.types import Group


class Parked:
    """Groups by id, the oldest first. They are not live, and their trajectories have no tokens.

    A reward worker may still be busy with a trajectory that was parked. Its answer would count for the next
    attempt, so its group is not `ready` before that answer is here.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._unanswered: set[int] = set()  # trajectories
        self._returned: set[int] = set()  # groups that have begun again

    @property
    def ready(self) -> list[Group]:
        """Those that may begin again."""
        if not self._unanswered:
            return list(self._groups.values())
        late = self._unanswered
        return [g for g in self._groups.values() if not any(m.trajectory_id in late for m in g.members)]

    def num_returned(self, live: Container[int], taken: Container[int]) -> int:
        """Of the `live` groups that are not `taken`, those that have begun again."""
        return sum(group_id in live and group_id not in taken for group_id in self._returned)

    def add(self, group: Group, unanswered: Iterable[int]) -> None:
        self._groups[group.group_id] = group
        self._unanswered.update(unanswered)
        self._returned.discard(group.group_id)

    def answered(self, trajectory_id: int) -> bool:
        """A reward worker has answered a trajectory that nobody waits for. Returns whether it was parked."""
        was_parked = trajectory_id in self._unanswered
        self._unanswered.discard(trajectory_id)
        return was_parked

    def begin_again(self, group: Group, live: Container[int]) -> None:
        del self._groups[group.group_id]
        self._returned = {group.group_id, *(i for i in self._returned if i in live)}

    def clear(self) -> list[Group]:
        """All groups; none is parked any more."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups
