"""One replica of the quickstart's run is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter

from millrace.core.events import Event


class Saboteur:
    """A sink that kills a replica with SIGKILL: the first, from `at_version` on, that is known to have
    sampled tokens of trajectories that have not finished."""

    def __init__(self, at_version: int) -> None:
        self._at_version = at_version
        self._version = 0
        self._pids: dict[str, int] = {}
        self._holder: dict[int, str] = {}  # trajectory -> the replica that works on it
        self._brought: Counter[str] = Counter()  # tokens that came with leases, without those that left
        self._generated: Counter[str] = Counter()
        self._reported: str | None = None  # the replica whose report came last
        self.victim: str | None = None
        self.killed_s = 0.0

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.kind == "worker_started":
            self._pids[fields["name"]] = fields["pid"]
        elif event.kind == "step":
            self._version = fields["version"]
        elif event.kind == "finished":  # this event follows the report that it came with
            self._brought[self._holder.pop(fields["trajectory_id"])] -= fields["tokens"]
            return
        if self.victim is None and self._version >= self._at_version and self._reported is not None:
            self._kill(self._reported, event.time_s)
        if event.kind == "leased":
            self._leased(fields["replica"], fields["trajectory_ids"], fields["resumed_tokens"])
        elif event.kind == "report":
            self._reported = fields["replica"]
            self._generated[self._reported] = fields["generated_tokens"]

    def _leased(self, replica: str, trajectory_ids: list[int], resumed_tokens: int) -> None:
        before = self._holder.get(trajectory_ids[0])
        if before is not None:
            self._brought[before] -= resumed_tokens
        self._brought[replica] += resumed_tokens
        self._holder.update(dict.fromkeys(trajectory_ids, replica))

    def _kill(self, replica: str, time_s: float) -> None:
        """If it has partial tokens: what was generated there or came with leases, and has not finished."""
        if self._generated[replica] + self._brought[replica] > 0:
            self.victim, self.killed_s = replica, time_s
            os.kill(self._pids[replica], signal.SIGKILL)
