"""A whole run with a trained drafter, in real processes, whose trainer is killed."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.long import long
from tests.process.test_run_survives import Killer
from tests.runs import events, train, weights
from transformers import AutoModelForCausalLM

from millrace.devices.served_weights import Base
from millrace.engines.own.load_engine import load_engine
from millrace.trainer.model import load_model

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


def test_an_anchor_with_a_drafter_is_the_weights_of_a_model(start, tmp_path):
    train(start, tmp_path / "run", *DRAFTS, f"weights.directory=file://{tmp_path}/weights", "steps=1")
    anchor, model = max((tmp_path / "weights").glob("*.safetensors")), tmp_path / "model"
    shutil.copytree(start.parent / "start", model)
    shutil.copy(anchor, model / "model.safetensors")
    stored = load_file(anchor)
    policy = {name: tensor for name, tensor in stored.items() if not name.startswith("drafter.")}
    assert len(policy) == len(stored) - 3
    engines = [load_engine(str(model), drafts=drafts, device="cpu") for drafts in (None, "trained")]
    assert [{buffer.name for buffer in engine.buffers()} for engine in engines] == [set(policy), set(stored)]
    assert set(Base(str(model), torch.float32).names) == set(policy)
    for loaded in (load_model(model, torch.device("cpu")), AutoModelForCausalLM.from_pretrained(model)):
        tensors = loaded.state_dict()
        assert all(torch.equal(tensor.float(), tensors[name].float()) for name, tensor in policy.items())
