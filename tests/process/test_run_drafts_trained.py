"""A whole run with a trained drafter, in real processes, whose trainer is killed."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from tests.long import long
from tests.process.test_run_survives import Killer
from tests.runs import events, train, weights

DRAFTS = "rollout.drafts=trained", "rollout.draft_tokens=3"

pytestmark = pytest.mark.usefixtures("warm")


def _third_step(event):
    return event.kind == "step" and event.fields["version"] == 3


def _digests(run):
    """Every digest that the trainer published, with its version."""
    return {(event.fields["version"], event.fields["digest"]) for event in events(run, "published")}


@long
def test_a_killed_trainer_publishes_the_same_drafter_again_and_the_policy_is_that_without_one(
    start, undisturbed, tmp_path
):
    killer = Killer("trainer", _third_step)
    run = train(start, tmp_path / "run", *DRAFTS, sinks=(killer,))
    assert [event.fields["name"] for event in events(run, "worker_died")] == [killer.killed]
    replayed = [event.fields["version"] for event in events(run, "step") if event.fields["replayed"]]
    assert replayed in ([3], [1, 2, 3]), (
        "from the checkpoint of version 2, or from none if it was not yet saved"
    )
    digests = [_digests(each) for each in (run, train(start, tmp_path / "straight", *DRAFTS))]
    assert digests[0] == digests[1] and len(digests[0]) == 5
    assert weights(run) == weights(undisturbed)
    saved = load_file(run.checkpoint(4) / "optimizer.safetensors")
    assert {"value/drafter.fuse", "published/drafter.fuse", "exp_avg/drafter.fuse"} <= saved.keys()
    assert saved["step/drafter.fuse"] == 4 * 8
    assert not any("drafter" in name for name in load_file(run.model / "model.safetensors"))
