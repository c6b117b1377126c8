"""Sinks that emit events of their own: the memory of workers, and some trajectories as text."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from millrace.conversations.tokenizer import Decode
from millrace.core.events import Event, Events
from millrace.core.rounding import all_equal
from millrace.core.types import Group, StepRecord, Trajectory
from millrace.observe.conversation_times import conversation, ended_by
from millrace.observe.shown_samples import clipped

EVERY_S = 10.0


class MemoryReporter:
    """A sink. At a report or a step, at most every `EVERY_S`, it reads a small file of the kernel for each
    process of a worker on this host. Shared pages, like those of torch, count for each process that maps
    them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._pids = {"controller": [os.getpid()]}
        self._emitted_s = float("-inf")

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "worker_started" if fields["pid"] is not None and _is_here(fields.get("address")):
                self._pids[fields["name"]] = fields.get("pids") or [fields["pid"]]
            case "worker_died":
                self._pids.pop(fields["name"], None)
            case "left":
                self._pids.pop(fields["replica"], None)
            case "report" | "step" if event.time_s >= self._emitted_s + EVERY_S:
                self._emitted_s = event.time_s
                self._emit()

    def _emit(self) -> None:
        resident_bytes_by_name = {}
        for name, pids in self._pids.items():
            with suppress(OSError):  # the process has just ended
                resident_bytes_by_name[name] = sum(map(resident_bytes, pids))
        self._events.emit(
            "memory",
            resident_bytes=resident_bytes_by_name,
            available_bytes=available_bytes(),
            controller_cpu_s=time.process_time(),
        )


def _is_here(address: str | None) -> bool:
    """Whether the host at `address` is this one. A process's number means another process on another host."""
    if address is None:
        return True
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False


def resident_bytes(pid: int) -> int:
    """Raises: OSError: there is no such process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def available_bytes() -> int | None:
    """What the host could still give; None: the kernel does not report it."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


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
