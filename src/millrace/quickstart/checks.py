"""The claims of the quickstart, and whether they are true."""

from __future__ import annotations

import json
from typing import Any

from millrace.core.events import Event
from millrace.core.types import Accounting
from millrace.estimates.evaluation import Evaluation
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace.observe.terminal import Check
from millrace.quickstart.saboteur import Saboteur
from millrace.run_directory.run_directory import RunDirectory

GAIN_MIN = 0.15
GAP_MAX = 1e-4


def checks(before: Evaluation, after: Evaluation, run: RunDirectory, saboteur: Saboteur) -> list[Check]:
    return [_learned(before, after), *checks_of_run(run, saboteur.victim, saboteur.killed_s)]


def checks_of_run(run: RunDirectory, victim: str | None, killed_s: float) -> list[Check]:
    """Those that need no evaluation. `victim`: a replica that was killed at this time of the run's clock."""
    return [_recovered(list(read_events(run.events)), victim, killed_s), *checks_of_accounts(run)]


def checks_of_accounts(run: RunDirectory, gap_max: float = GAP_MAX) -> list[Check]:
    """Those that need no evaluation and no victim. `gap_max`: the limit of the log-prob gap, in nats."""
    summary = json.loads(run.summary.read_text())
    return [
        _nothing_lost(run, summary),
        _digests_equal(list(read_events(run.events))),
        _gap(summary, gap_max),
    ]


def _learned(before: Evaluation, after: Evaluation) -> Check:
    greedy = after.greedy_accuracy - before.greedy_accuracy
    sampled = after.sampled_accuracy - before.sampled_accuracy
    detail = f"greedy {greedy:+.3f}, sampled {sampled:+.3f}, at least {GAIN_MIN:+.2f} each"
    return Check("learned", min(greedy, sampled) >= GAIN_MIN, detail)


def _recovered(events: list[Event], victim: str | None, killed_s: float) -> Check:
    """The killed replica restarted, and its trajectories went on from their partial tokens."""
    died = [e for e in events if e.kind == "worker_died" and e.fields["name"] == victim]
    back = [
        e
        for e in events
        if e.kind == "worker_recovered" and e.fields["name"] == victim and e.time_s > killed_s
    ]
    if not died or not back:
        return Check("recovered", False, f"{victim}: died {len(died)} times, back {len(back)} times")
    lost = work_of(events, victim, killed_s)
    later = [e.fields for e in events if e.kind == "leased" and e.time_s > killed_s]
    tokens = sum(f["resumed_tokens"] for f in later if not lost.isdisjoint(f["trajectory_ids"]))
    detail = (
        f"{victim} killed, back after {back[0].fields['recovery_s']:.2f} s; "
        f"the {len(lost)} trajectories it worked on went on from {tokens} partial tokens"
    )
    return Check("recovered", tokens > 0, detail)


def work_of(events: list[Event], replica: str | None, time_s: float) -> set[int]:
    """The trajectories on which the replica worked at this time of the run's clock."""
    works: set[int] = set()
    for event in events:
        if event.time_s > time_s:
            break
        if event.kind == "leased" and event.fields["replica"] == replica:
            works.update(event.fields["trajectory_ids"])
        elif event.kind == "leased":
            works.difference_update(event.fields["trajectory_ids"])
        elif event.kind in ("finished", "ended"):
            works.discard(event.fields["trajectory_id"])
    return works


def _nothing_lost(run: RunDirectory, summary: dict[str, Any]) -> Check:
    """The ledger's accounts close, and every admitted trajectory ended, once."""
    accounting = Accounting(**summary["accounting"])
    with LedgerReader(run.ledger) as reader:
        trained = [i for step in reader.steps() for i in step.trajectory_ids]
    passed = accounting.balanced and len(trained) == len(set(trained)) == accounting.trained
    detail = f"{accounting.admitted} admitted = {accounting.trained} trained (each once)"
    for name in ("rejected", "stale", "abandoned", "failed", "in_flight"):
        detail += f" + {getattr(accounting, name)} {name.replace('_', ' ')}"
    return Check("nothing lost", passed, detail)


def _digests_equal(events: list[Event]) -> Check:
    """Every replica served what the trainer published, for each version."""
    kinds = ("published", "staged")  # digests of several ranks' blocks, then of the whole tensors
    published = {e.fields["version"]: e.fields["digest"] for e in events if e.kind in kinds}
    served = [(e.fields["version"], e.fields["digest"]) for e in events if e.kind == "pulled"]
    equal = sum(published.get(version) == digest for version, digest in served)
    return Check("digests equal", bool(served) and equal == len(served), f"{equal} of {len(served)} swaps")


def _gap(summary: dict[str, Any], gap_max: float) -> Check:
    gap = summary["logprob_gap_staleness0"]
    passed = gap["max"] is not None and gap["max"] < gap_max
    shown = (
        "no token at staleness 0" if gap["max"] is None else f"max {gap['max']:.1e}, mean {gap['mean']:.1e}"
    )
    return Check("log-prob gap at staleness 0", passed, f"{shown}; limit {gap_max:.0e}")
