"""Which known faults a run has, from its evidence alone, at its end or while it goes on. Pure rules, each in
the module of its idea.

Only a cause is reported, not its consequences. With wrong weights every gap is wrong. In a run that diverged,
groups have no signal and the policy moves too far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from millrace.core.events import Event, Events
from millrace.diagnose.episode_faults import (
    broken_turns,
    episodes_cut,
    forked_turns,
    refused_calls,
    repeated_calls,
    rewarded_cut,
    slow_environment,
)
from millrace.diagnose.evidence import Evidence
from millrace.diagnose.finding import Finding, withdrawn
from millrace.diagnose.hacking import (
    canary_rewarded,
    constant_reward,
    lengths_explode,
    shared_string,
    tests_not_run,
)
from millrace.diagnose.learning import (
    diverging_optimizer,
    evaluations_skipped,
    failing_rewards,
    few_effective_tokens,
    needless_staleness,
    no_signal,
    overfitting,
    silenced_tokens,
    unfair_batches,
)
from millrace.diagnose.weights import host_behind, numeric_gap, stale_cache, true_staleness, wrong_weights

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    wrong_weights,
    stale_cache,
    diverging_optimizer,
    failing_rewards,
    canary_rewarded,
    tests_not_run,
    constant_reward,
    lengths_explode,
    shared_string,
    episodes_cut,
    rewarded_cut,
    broken_turns,
    forked_turns,
    repeated_calls,
    refused_calls,
    no_signal,
    numeric_gap,
    true_staleness,
    few_effective_tokens,
    silenced_tokens,
    unfair_batches,
    needless_staleness,
    slow_environment,
    host_behind,
    overfitting,
    evaluations_skipped,
)
EXPLAINS = {
    "wrong-weights": {"numeric-gap", "true-staleness", "few-effective-tokens", "silenced-tokens"},
    "stale-cache": {"numeric-gap", "true-staleness", "few-effective-tokens", "silenced-tokens"},
    "diverging-optimizer": {
        *("no-signal", "numeric-gap", "true-staleness", "few-effective-tokens", "silenced-tokens"),
    },
    "constant-reward": {"no-signal"},
    "episodes-cut": {"rewarded-cut"},
    "broken-turns": {"no-signal"},
    "true-staleness": {"few-effective-tokens"},
}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Every fault that no other fault explains, the most basic first. Empty: none."""
    findings = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    explained = {fault for finding in findings for fault in EXPLAINS.get(finding.fault, ())}
    return [finding for finding in findings if finding.fault not in explained]


def gone(evidence: Evidence, findings: list[Finding]) -> list[str]:
    """Faults that the run reported and that are not among `findings` now, as text."""
    reported = {fault: withdrawn(fault, version, version) for fault, version in evidence.reported.items()}
    now = {finding.fault for finding in findings}
    return [text for fault, text in (evidence.gone | reported).items() if fault not in now]


# ---------------------------------------------------------------- while a run goes on


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
