"""A whole run on Ray is the run that it is in processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import events, summary, train, weights

from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory

RAY = "runtime.kind=ray"


def steps(run: RunDirectory) -> list[tuple[int, list[int], list[int]]]:
    with LedgerReader(run.ledger) as reader:
        return [(step.version, step.group_ids, step.trajectory_ids) for step in reader.steps()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_synchronous_run_on_ray_trains_the_prompts_and_weights_of_a_local_one(
    ranks: int, start: Path, address: str, tmp_path: Path
) -> None:
    shard = f"trainer.shard={ranks}"
    here = train(start, tmp_path / "here" / "run", shard)
    there = train(start, tmp_path / "there" / "run", shard, RAY, f"runtime.address={address}")
    assert steps(there) == steps(here)
    assert weights(there) == weights(here)
    accounting = summary(there)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    assert {event.fields["name"] for event in events(there, "worker_started")} >= {"relay", "trainer"}
    assert (there.logs / "replica-0.1.log").exists()
