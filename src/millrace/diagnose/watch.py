"""The doctor while a run goes on. A `finding` event reports a fault; `withdrawn` reports that it is gone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from millrace.core.events import Event, Events
from millrace.diagnose.evidence import Evidence
from millrace.diagnose.finding import withdrawn
from millrace.diagnose.rules import diagnose

FIRST_STEPS = 20
"""Before the first look: the figures of fewer steps are noise."""
LATER = 1.25
"""The next look comes after so many times as many steps, so all looks together stay cheap."""


class DoctorWatch:
    """A sink. `evidence` has the events of earlier sessions of the run. The doctor looks after `FIRST_STEPS`
    steps, then ever more rarely, and at the end. So its last findings are those of `millrace doctor`.

    A failure in here ends the looks with a warning, and not the run.
    """

    def __init__(self, events: Events, evidence: Evidence) -> None:
        self._events, self._evidence = events, evidence
        self._due: int | None = FIRST_STEPS
        self._looked = evidence.version

    def __call__(self, event: Event) -> None:
        if self._due is None:
            return
        try:
            events = self._look(event, self._due)
        except Exception as error:
            self._due = None
            reason = f"no more looks during this run: {type(error).__name__}: {error}"
            self._events.emit("warned", source="doctor", reason=reason)
            return
        for kind, fields in events:
            self._events.emit(kind, **fields)

    def _look(self, event: Event, due: int) -> list[tuple[str, dict[str, Any]]]:
        """Kinds and fields of the events to emit."""
        self._evidence(event)
        steps = len(self._evidence.by_version)
        if event.kind != "run_ended" and (event.kind != "step" or steps < due):
            return []
        self._due = max(FIRST_STEPS, int(steps * LATER))
        findings = {finding.fault: finding for finding in diagnose(self._evidence)}
        reported, last, self._looked = self._evidence.reported, self._looked, self._evidence.version
        return [
            *(
                ("withdrawn", {"fault": fault, "reason": withdrawn(fault, first, max(first, last))})
                for fault, first in reported.items()
                if fault not in findings
            ),
            *(("finding", asdict(finding)) for fault, finding in findings.items() if fault not in reported),
        ]
