"""Episodes that begin before their groups do. No I/O.

An agent may need seconds until it asks for the first time. So the agents of the next groups start while the
groups before them generate. What an agent asks is kept until its trajectory wants it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from millrace.controller.state.groups import members_of
from millrace.core.completion.columns import token_array
from millrace.core.types import Finish, Observed, Prompt, Score, ScoreRequest


class Begun(NamedTuple):
    """The first request of an agent, or why there is none; of which worker; and the seconds that it took."""

    answer: Score | Observed
    worker: str
    took_s: float


class BegunAhead:
    """Requests for episodes that nobody waits for yet. `group_size`: see `PromptStream`. `room`: tokens of a
    sequence."""

    def __init__(self, group_size: int | None, room: int) -> None:
        self._group_size, self._room = group_size, room
        self._asked: dict[int, ScoreRequest] = {}  # by trajectory
        self._begun: dict[int, Begun] = {}

    def members(self, group_ids: Iterable[int]) -> list[int]:
        return [tid for group_id in group_ids for tid in members_of(group_id, self._group_size or 0)]

    def requests(self, prompt: Prompt) -> list[ScoreRequest]:
        """Of all members but the first, whose first request is the prompt."""
        first = ScoreRequest(
            trajectory_id=-1,
            group_id=prompt.group_id,
            tokens=token_array(),
            finish=Finish.TURN,
            room=self._room - len(prompt.tokens),
            prompt=prompt.tokens,
            row_digest=prompt.row_digest,
            begins=True,
        )
        asked = [replace(first, trajectory_id=tid) for tid in self.members([prompt.group_id])[1:]]
        self._asked |= {one.trajectory_id: one for one in asked}
        return asked

    def came(self, trajectory_id: int, begun: Begun) -> bool:
        """Whether nobody waits for this answer yet."""
        if is_ahead := trajectory_id in self._asked:
            self._begun[trajectory_id] = begun
        return is_ahead

    def take(self, trajectory_id: int) -> tuple[bool, Begun | None]:
        """A trajectory waits for its begin from now on: whether that was asked for, and the answer if it is
        here."""
        return self._asked.pop(trajectory_id, None) is not None, self._begun.pop(trajectory_id, None)

    def forget(self, ids: Iterable[int]) -> None:
        for trajectory_id in ids:
            self.take(trajectory_id)

    def left(self, worker: str) -> list[ScoreRequest]:
        """A worker is gone: these episodes are to begin again. One that has failed does not: else it could
        end worker after worker."""
        here = (tid for tid, one in self._begun.items() if one.worker == worker)
        lost = [tid for tid in here if isinstance(self._begun[tid].answer, Observed)]
        self._begun = {tid: one for tid, one in self._begun.items() if tid not in lost}
        return [self._asked[trajectory_id] for trajectory_id in lost]
