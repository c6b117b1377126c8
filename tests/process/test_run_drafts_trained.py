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


@long
def test_a_killed_trainer_publishes_the_same_drafter_again_and_the_policy_is_that_without_one(
    start, undisturbed, tmp_path
):
    killer = Killer("trainer", _third_step)
    run = train(start, tmp_path / "run", *DRAFTS, sinks=(killer,))
    assert [event.fields["name"] for event in events(run, "worker_died")] == [killer.killed]
    repeated = [event.fields["version"] for event in events(run, "step") if event.fields["replayed"]]
    assert repeated == [3], "its digest is that of the first time, or the run would have ended"
    assert weights(run) == weights(undisturbed)
    published = {event.fields["weights_bytes"] for event in events(run, "published")}
    assert published != {event.fields["weights_bytes"] for event in events(undisturbed, "published")}
    saved = load_file(run.checkpoint(4) / "optimizer.safetensors")
    assert {"value/drafter.fuse", "published/drafter.fuse", "exp_avg/drafter.fuse"} <= saved.keys()
    assert saved["step/drafter.fuse"] == 4 * 8
    assert not any("drafter" in name for name in load_file(run.model / "model.safetensors"))
