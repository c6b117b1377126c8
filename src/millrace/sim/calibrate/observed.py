"""Prompts and completions as a real run had them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.errors import DataError
from millrace.sim.virtual.seeded import uniform


@dataclass(frozen=True, slots=True)
class ObservedGroups:
    """Completion lengths drawn a whole group at a time: answers to one prompt are alike, and a group is ready
    with its longest. `groups` are those observed, each with `group_size` lengths.

    A `sim.costs.lengths.Lengths`: trajectory ids count group by group.
    """

    groups: tuple[tuple[int, ...], ...]
    group_size: int

    @classmethod
    def of(cls, lengths: Sequence[int], group_size: int) -> ObservedGroups:
        """From the lengths of all trajectories in the order of their ids; those of 0 tokens (never
        generated) and the rest of their group are left out.

        Raises: DataError: not one group is whole.
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
