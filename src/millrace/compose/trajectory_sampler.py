"""Some trajectories as text while the run goes on: `sample` events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.conversations.tokenizer import Decode
from millrace.core.events import Event, Events
from millrace.core.rounding import all_equal
from millrace.core.types import Group, StepRecord, Trajectory
from millrace.observe.conversation_times import conversation, ended_by
from millrace.observe.shown_samples import clipped


class Record(Protocol):
    """What the sampler reads of the ledger."""

    def steps_after(self, version: int) -> list[StepRecord]: ...

    def group(self, group_id: int) -> Group: ...


class TrajectorySampler:
    """A sink. After the first step of a session, and after every `every`-th, it emits the best, the middle
    and the worst trajectory of one group of the batch. It reads that group from the ledger, in milliseconds.

    A failure in here ends the samples with a warning, and not the run.
    """

    def __init__(self, events: Events, record: Record, decode: Decode, every: int) -> None:
        self._events, self._record, self._decode = events, record, decode
        self._every: int | None = every
        self._has_emitted = False

    def __call__(self, event: Event) -> None:
        if event.kind != "step" or event.fields["replayed"] or self._every is None:
            return
        version: int = event.fields["version"]
        if version % self._every and self._has_emitted:
            return
        self._has_emitted = True
        try:
            self._emit(version)
        except Exception as error:
            self._every = None
            reason = f"no samples from here on: {type(error).__name__}: {error}"
            self._events.emit("warned", source="samples", reason=reason)

    def _emit(self, version: int) -> None:
        step = next(step for step in self._record.steps_after(version - 1) if step.version == version)
        group = self._record.group(step.group_ids[version % len(step.group_ids)])
        trained = [member for member in group.members if member.trajectory_id in set(step.trajectory_ids)]
        for place, trajectory in spread(trained).items():
            columns, text = trajectory.columns, self._decode(trajectory.columns.tokens.tolist())
            turns = conversation(columns, trajectory.metrics, lambda ids: clipped(self._decode(ids)))
            self._events.emit(
                "sample",
                version=version,
                place=place,
                trajectory_id=trajectory.trajectory_id,
                row_id=group.row_id,
                state=trajectory.state.value,
                reason=trajectory.reason,
                reward=trajectory.reward,
                finish=trajectory.finish.value if trajectory.finish else None,
                num_tokens=len(columns),
                trained_version=version,
                versions=sorted({sampled for sampled, _ in columns.sampled_runs}),
                prompt=clipped(group.text),
                completion=clipped(text),
                **({"turns": turns, "ended_by": ended_by(trajectory.metrics)} if turns else {}),
            )


def spread(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """The best, the middle and the worst by reward, without repeats. If all rewards are equal, only one."""
    ranked = sorted(trajectories, key=lambda t: (-(t.reward or 0.0), t.trajectory_id))
    if not ranked:
        return {}
    places = {"best": ranked[0]}
    if not all_equal(one.reward or 0.0 for one in ranked):
        if len(ranked) > 2:
            places["middle"] = ranked[len(ranked) // 2]
        places["worst"] = ranked[-1]
    return places
