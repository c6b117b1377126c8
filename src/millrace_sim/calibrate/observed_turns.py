"""The turns of a real run: how many an episode has, their lengths, and how long their answers took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.core.events import Event


@dataclass(slots=True)
class ObservedTurns:
    """Sampled tokens of each turn, turns of each complete episode, tokens of each observation, and seconds
    from the end of each turn to its answer."""

    tokens: list[float] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    observations: list[int] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> ObservedTurns | None:
        """None: no environment answered."""
        turns, ended_s = cls(), dict[int, float]()
        known, counts = Counter[int](), Counter[int]()  # tokens and turns of each trajectory
        for event in events:
            tid = event.fields.get("trajectory_id", -1)
            if event.kind == "finished":
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
