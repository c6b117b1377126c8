"""What must come out the same, bit for bit, through real processes on the CPU."""

from __future__ import annotations

import pytest
from tests.long import long
from tests.runs import events, summary, train, weights

ON_POLICY = {
    "areal": ("schedule.kind=areal", "schedule.eta=0"),
    "rlax": ("schedule.kind=rlax",),
}
BLIND = ("sampling.token_masks=false", 'allow=["cut_sampling"]')


@pytest.fixture(scope="module")
def runs(start, undisturbed, warm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    others = {name: train(start, directory / name, *sets) for name, sets in ON_POLICY.items()}
    return {"synchronous": undisturbed, **others}


@long
def test_schedules_without_staleness_are_one_algorithm(runs):
    first, *others = (weights(run) for run in runs.values())
    assert all(other == first for other in others)


def test_training_changed_the_weights(runs, start):
    assert weights(runs["areal"]) != (start.parent / "start" / "model.safetensors").read_bytes()


def test_every_step_saw_the_same_rewards(runs):
    rewards = [[e.fields["reward_mean"] for e in events(run, "step")] for run in runs.values()]
    assert rewards[0] == rewards[1] == rewards[2]


def test_engine_and_trainer_agree_on_log_probs_at_staleness_0(runs):
    for run in runs.values():
        gap = summary(run)["logprob_gap_staleness0"]
        assert gap["max"] < 1e-4 and summary(run)["staleness"]["max"] == 0


@long
@pytest.mark.parametrize("cuts", [("sampling.top_p=0.9",), ("sampling.top_k=4", "sampling.min_p=0.02")])
def test_cut_sampling_is_on_policy_over_the_tokens_that_could_come(cuts, start, warm, tmp_path):
    run = train(start, tmp_path / "run", *cuts)
    assert summary(run)["staleness"]["max"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-5  # ratios are 1
    blind = train(start, tmp_path / "blind", *cuts, *BLIND)
    assert summary(blind)["logprob_gap_staleness0"]["max"] > 0.05


@pytest.mark.parametrize("kind", ["llamarl", "laminar", "areal"])
def test_the_asynchronous_presets_train_the_same_configuration(kind, start, warm, tmp_path):
    run = train(start, tmp_path / kind, f"schedule.kind={kind}")
    accounting = summary(run)["accounting"]
    assert summary(run)["steps"] == 4
    assert accounting["trained"] == accounting["admitted"] == 64
