"""The doctor while a run goes on: each fault is told once, as a `finding` event."""

from __future__ import annotations

from dataclasses import asdict

from millrace.core.events import Event, Events
from millrace.observe.doctor.evidence import Evidence
from millrace.observe.doctor.finding import Finding
from millrace.observe.doctor.rules import diagnose

FIRST_STEPS = 20
"""Before the first look: fewer steps tell noise."""
LATER = 1.25
"""How many times as many steps there are at the next look: all looks together stay cheap."""


class DoctorWatch:
    """A sink. It looks after `FIRST_STEPS` steps of this process, then ever more rarely.

    What fails here ends the looks with a warning, and not the run.
    """

    def __init__(self, events: Events, evidence: Evidence) -> None:
        self._events, self._evidence = events, evidence
        self._due: int | None = FIRST_STEPS
        self._told: set[str] = set()

    def __call__(self, event: Event) -> None:
        if self._due is None:
            return
        try:
            found = self._look(event, self._due)
        except Exception as error:
            self._due = None
            reason = f"no more looks during this run: {type(error).__name__}: {error}"
            self._events.emit("warned", source="doctor", reason=reason)
            return
        for finding in found:
            if finding.fault not in self._told:
                self._told.add(finding.fault)
                self._events.emit("finding", **asdict(finding))

    def _look(self, event: Event, due: int) -> list[Finding]:
        self._evidence(event)
        steps = len(self._evidence.by_version)
        if event.kind != "step" or steps < due:
            return []
        self._due = int(steps * LATER)
        return diagnose(self._evidence)
