"""Run directories to look at, written by the real sinks and the real ledger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from millrace.config.freeze import record
from millrace.config.load import Source, combine, read_mapping
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.events import Event
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace.run_directory.run_directory import RunDirectory
from tests.unit.ledger_records import ready_group, step_of
from tests.unit.observe_events import (
    published,
    pulled,
    report,
    run_started,
    step,
    worker_died,
    worker_started,
)

PROMPT = "<script>alert(1)</script>"
"""Of every group: what must never reach a browser as it is."""


def events(steps: int = 4) -> list[Event]:
    log = [run_started(), worker_started(0.5, "replica-0")]
    for version in range(1, steps + 1):
        log += [step(2.0 * version, version), published(2.0 * version + 0.2, version, 0.1)]
        log += [pulled(2.0 * version + 0.5, "replica-0")]
        log += [report(2.0 * version + 0.6, "replica-0", 10 * version, 1.0 * version, 0.5 * version)]
    return [*log, worker_died(2.0 * steps + 1, "replica-0")]


def write_run(path: Path, *, steps: int = 4, log: Iterable[Event] | None = None) -> RunDirectory:
    """A run that was killed after `steps` steps of 2 groups."""
    path.mkdir(parents=True)
    run = RunDirectory(path)
    model = path.parent / "start"
    if not model.exists():
        model.mkdir()
        make_character_tokenizer(model, "abcdefghijklmnopqrstuvwxyz")
    record(config(model), run.config)
    for made in EventLog(run.events), MetricsLog(run.metrics):
        for event in events(steps) if log is None else log:
            made(event)
        made.close()
    _write_ledger(run.ledger, steps)
    return run


def config(model: Path) -> Config:
    tree = {
        "steps": 8,
        "model": {"path": str(model)},
        "task": {"kind": "gym", "name": "spell_backward"},
        "reward": {"kind": "gym"},
    }
    return combine(Config, Source({}, {}), read_mapping(Config, tree, "a test"))


def _write_ledger(path: Path, steps: int) -> None:
    ledger = SqliteLedger(path, run={})
    for version in range(1, steps + 1):
        groups = [ready_group(2 * version + i, version - 1) for i in range(2)]
        for group in groups:
            group.text = PROMPT
            for member in group.members:
                tokens = member.columns.tokens
                tokens[:] = type(tokens)("i", [5 + member.trajectory_id % 26] * len(tokens))
                member.reward = member.trajectory_id / 10
        ledger.admit(groups)
        ledger.flush()
        ledger.commit_step(step_of(version, *groups))
    ledger.close()
