"""The doctor while a run goes on: each fault is told once, as a `finding` event."""

from __future__ import annotations

from dataclasses import asdict

from millrace.core.events import Event, Events
from millrace.observe.doctor.evidence import Evidence
from millrace.observe.doctor.rules import diagnose

FIRST_STEPS = 20
"""Before the first look: fewer steps tell noise."""
LATER = 1.25
"""How many times as many steps there are at the next look: all looks together stay cheap."""


class DoctorWatch:
    """A sink. It looks after `FIRST_STEPS` steps of this process, then ever more rarely."""

    def __init__(self, events: Events, evidence: Evidence) -> None:
        self._events, self._evidence = events, evidence
        self._due = FIRST_STEPS
        self._told: set[str] = set()

    def __call__(self, event: Event) -> None:
        self._evidence(event)
        if event.kind == "step" and len(self._evidence.by_version) >= self._due:
            self._due = int(len(self._evidence.by_version) * LATER)
            self._look()

    def _look(self) -> None:
        for finding in diagnose(self._evidence):
            if finding.fault not in self._told:
                self._told.add(finding.fault)
                self._events.emit("finding", **asdict(finding))
