"""One replica of the quickstart's run is killed."""

from __future__ import annotations

import os
import signal

from millrace.core.events import Event


class Saboteur:
    """A sink that kills a replica with SIGKILL: the first, from `at_version` on, that reports
    trajectories in the middle of their generation."""

    def __init__(self, at_version: int) -> None:
        self._at_version = at_version
        self._version = 0
        self._pids: dict[str, int] = {}
        self.victim: str | None = None
        self.killed_s = 0.0

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.kind == "worker_started":
            self._pids[fields["name"]] = fields["pid"]
        elif event.kind == "step":
            self._version = fields["version"]
        elif event.kind == "report" and self._due() and fields["running"]:
            self.victim, self.killed_s = fields["replica"], event.time_s
            os.kill(self._pids[fields["replica"]], signal.SIGKILL)

    def _due(self) -> bool:
        return self.victim is None and self._version >= self._at_version
