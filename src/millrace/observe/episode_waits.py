"""The episodes under way: whether each one waits for the model or for its environment, and since when.

An agent is an environment too: while the model writes a turn, the agent waits for the reply to its request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from millrace.core.events import Event
from millrace.core.types import Finish
from millrace.observe.conversation import ENVIRONMENT, MODEL


class EpisodeWait(NamedTuple):
    """`role`: who is to write next, the model or the environment."""

    since_wall_s: float
    trajectory_id: int
    role: str


@dataclass(slots=True)
class EpisodeWaits:
    """A sink. A wait for the model begins with the first lease of the trajectory, or with the answer of the
    environment. A wait for the environment begins with the end of a turn, and ends with an answer or a
    reward. `plays`: some trajectory may have several turns."""

    plays: bool = False
    wall_s: float = 0.0  # of the newest event
    _waits: dict[int, EpisodeWait] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        self.wall_s = event.wall_s
        match event.kind:
            case "run_started" | "run_ended":
                self._waits.clear()
            case "leased":
                for trajectory_id in event.fields["trajectory_ids"]:
                    if trajectory_id not in self._waits:
                        self._begin(trajectory_id, MODEL)
            case "finished":
                self.plays |= event.fields.get("finish") == Finish.TURN
                self._begin(event.fields["trajectory_id"], ENVIRONMENT)
            case "observed":
                self.plays = True
                self._begin(event.fields["trajectory_id"], MODEL)
            case "scored" | "ended" | "restarted":
                self._waits.pop(event.fields["trajectory_id"], None)

    def _begin(self, trajectory_id: int, role: str) -> None:
        self._waits[trajectory_id] = EpisodeWait(self.wall_s, trajectory_id, role)

    def count(self, role: str) -> int:
        return sum(wait.role == role for wait in self._waits.values())

    def longest_s(self, role: str, wall_s: float | None = None) -> float:
        """Of the longest wait until `wall_s`, by default until the newest event. 0: none waits."""
        until_s = self.wall_s if wall_s is None else wall_s
        begins = (wait.since_wall_s for wait in self._waits.values() if wait.role == role)
        return max(0.0, until_s - min(begins, default=until_s))

    def oldest(self, num: int) -> list[EpisodeWait]:
        """The `num` longest waits, the longest first."""
        return nsmallest(num, self._waits.values())
