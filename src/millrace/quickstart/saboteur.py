"""One replica of the quickstart's run is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

from millrace.core.events import Event

DRAIN_S = 0.25
"""The messages of a suspended replica arrive within this time."""
_BEGUN_S = 0.003
"""So long after a lease, the replica works on the trajectory."""
_SUSPENDED_S = 0.03
"""Longer than `rollout.report_interval_s`, so that the replica reports its progress at once afterwards."""


class Saboteur:
    """A sink that kills a replica with SIGKILL, from `at_version` on: the first replica that has generated
    tokens of unfinished trajectories.

    The replica is suspended first, because it may finish its trajectories before the signal arrives. A
    replica that did so goes on. A fast replica finishes its work before it reports any token, so the saboteur
    suspends it shortly at each lease."""

    def __init__(self, at_version: int) -> None:
        self._at_version = at_version
        self._version = 0
        self._pids: dict[str, int] = {}
        self._holder: dict[int, str] = {}  # trajectory -> the replica that works on it
        self._brought: Counter[str] = Counter()  # tokens that came with leases, less those that left
        self._generated: Counter[str] = Counter()
        self._suspended: tuple[str, float] | None = None  # replica, since when
        self.victim: str | None = None
        self.killed_s = 0.0

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if self._suspended is not None and event.time_s > self._suspended[1] + DRAIN_S:
            self._decide(self._suspended[0], event.time_s)
        match event.kind:
            case "worker_started":
                self._pids[fields["name"]] = fields["pid"]
            case "step":
                self._version = fields["version"]
            case "finished":
                self._brought[self._holder.pop(fields["trajectory_id"])] -= fields["tokens"]
            case "leased":
                self._leased(fields["replica"], fields["trajectory_ids"], fields["resumed_tokens"])
                if self._wants_victim():
                    threading.Thread(target=self._hold_up, args=(fields["replica"],), daemon=True).start()
            case "report":
                self._generated[fields["replica"]] = fields["generated_tokens"]
                if fields["running"] and self._wants_victim():
                    self._suspended = fields["replica"], event.time_s
                    os.kill(self._pids[fields["replica"]], signal.SIGSTOP)

    def _wants_victim(self) -> bool:
        return self.victim is None and self._suspended is None and self._version >= self._at_version

    def _hold_up(self, replica: str) -> None:
        time.sleep(_BEGUN_S)
        if self._wants_victim():
            os.kill(self._pids[replica], signal.SIGSTOP)
            time.sleep(_SUSPENDED_S)
            if replica not in (self.victim, self._suspended and self._suspended[0]):
                os.kill(self._pids[replica], signal.SIGCONT)

    def _leased(self, replica: str, trajectory_ids: list[int], resumed_tokens: int) -> None:
        before = self._holder.get(trajectory_ids[0])
        if before is not None:
            self._brought[before] -= resumed_tokens
        self._brought[replica] += resumed_tokens
        self._holder.update(dict.fromkeys(trajectory_ids, replica))

    def _decide(self, replica: str, time_s: float) -> None:
        """Kill the replica if it has tokens of unfinished trajectories, generated there or leased."""
        self._suspended = None
        if self._generated[replica] + self._brought[replica] > 0:
            self.victim, self.killed_s = replica, time_s
            os.kill(self._pids[replica], signal.SIGKILL)
        else:
            os.kill(self._pids[replica], signal.SIGCONT)
