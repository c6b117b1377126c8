"""The lengths of a real run's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.errors import DataError
from millrace_sim.virtual.seeded import uniform


@dataclass(frozen=True, slots=True)
class ObservedGroups:
    """Completion lengths, drawn by whole groups. Answers to one prompt have similar lengths, and the longest
    answer decides when a group is ready. `groups` are the observed groups, each with `group_size` lengths.

    A `sim.costs.lengths.Lengths`: trajectory ids count group by group.
    """

    groups: tuple[tuple[int, ...], ...]
    group_size: int

    @classmethod
    def of(cls, lengths: Sequence[int], group_size: int) -> ObservedGroups:
        """From the lengths of all trajectories in the order of their ids. A group with a length of 0 (never
        generated) is left out.

        Raises: DataError: no group is whole.
        """
        whole = [
            tuple(lengths[i : i + group_size])
            for i in range(0, len(lengths) - group_size + 1, group_size)
            if all(lengths[i : i + group_size])
        ]
        if not whole:
            raise DataError("the run has not one group whose completions are all there: let it run longer")
        return cls(tuple(whole), group_size)

    def draw(self, seed: int, trajectory_id: int) -> float:
        group, member = divmod(trajectory_id, self.group_size)
        index = int(uniform(seed, "observed group", group) * len(self.groups))
        return float(self.groups[index][member])
