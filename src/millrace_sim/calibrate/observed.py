"""The lengths of a real run's completions; its turns, their lengths, and how long their answers took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millrace.core.errors import DataError
from millrace.core.events import Event
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


@dataclass(slots=True)
class ObservedTurns:
    """Sampled tokens of each turn, turns of each complete episode, tokens of each observation, and seconds
    from the end of each turn to its answer. `starts_s`: seconds until each agent made its first request, and
    `own_prompts`: the tokens of it that are not its group's."""

    tokens: list[float] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    observations: list[int] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    own_prompts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> ObservedTurns | None:
        """None: no environment answered."""
        turns, ended_s, beginning_s = cls(), dict[int, float](), dict[int, float]()
        known, counts = Counter[int](), Counter[int]()  # tokens and turns of each trajectory
        for event in events:
            tid = event.fields.get("trajectory_id", -1)
            if event.kind == "beginning":
                beginning_s |= dict.fromkeys(event.fields["trajectory_ids"], event.time_s)
            elif event.kind == "observed" and tid in beginning_s:
                waited_s = event.time_s - beginning_s.pop(tid)
                turns.starts_s.append(event.fields.get("start_s", waited_s))
                turns.own_prompts.append(event.fields["tokens"])
                known[tid] = event.fields["tokens"]
            elif event.kind == "finished":
                turns.tokens.append(float(event.fields["tokens"] - known[tid]))
                known[tid], ended_s[tid] = event.fields["tokens"], event.time_s
                counts[tid] += 1
            elif event.kind in ("observed", "scored") and tid in ended_s:
                turns.answers_s.append(event.time_s - ended_s.pop(tid))
                if event.kind == "observed":
                    known[tid] += event.fields["tokens"]
                    turns.observations.append(event.fields["tokens"])
                else:
                    turns.num_turns.append(counts[tid])
        return turns if turns.observations and turns.num_turns else None
