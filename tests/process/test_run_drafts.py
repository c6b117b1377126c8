"""A whole run whose replicas draft from completions of each other, and of an earlier session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import events, train

from millrace.cli.app import run as command_line

SET = ("task.size=4", "batch.prompts=4", "batch.group_size=2", "sampling.temperature=0.2")

pytestmark = pytest.mark.usefixtures("warm")


def test_earlier_completions_reach_the_replicas_also_of_a_resumed_run(start: Path, tmp_path: Path) -> None:
    changes = (*SET, "rollout.drafts=earlier", "steps=2", "checkpoints.every=1")
    run = train(start, tmp_path / "run", *changes)
    first = [lease.fields["earlier_tokens"] for lease in events(run, "leased")]
    assert command_line(["train", "--run-dir", str(run.path), "--resume", "--set", "steps=3"]) == 0
    resumed = events(run, "leased")[len(first) :]
    assert first[0] == 0 < max(first)
    assert resumed and all(lease.fields["earlier_tokens"] for lease in resumed)
    drafted: dict[str, int] = {}
    for report in events(run, "report"):
        drafted[report.fields["replica"]] = report.fields["drafted_tokens"]
    assert max(drafted.values()) > 0
    assert [step.fields["version"] for step in events(run, "step")] == [1, 2, 3]
