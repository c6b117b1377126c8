from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_doubles import save_tiny_model
from transformers import AutoModelForCausalLM

from millrace.core.errors import DataError, TrainingError
from millrace.sft.supervised import sft
from millrace.trainer.model import load_model

ARGUMENTS = {"steps": 30, "lr": 3e-3, "batch_tokens": 200, "device": "cpu"}


@pytest.fixture
def model_dir(tmp_path):
    return save_tiny_model(tmp_path / "model")


def reversals(count=200):
    random = np.random.default_rng(0)
    words = [random.integers(3, 20, int(random.integers(2, 5))).tolist() for _ in range(count)]
    return [([*word, 1], [*word[::-1], 2]) for word in words]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_and_the_model_is_saved(model_dir, tmp_path, optimizer):
    history = sft(model_dir, reversals(), out_dir=tmp_path / "out", optimizer=optimizer, **ARGUMENTS)
    assert len(history) == 30
    assert np.mean([s.loss for s in history[-5:]]) < 0.75 * np.mean([s.loss for s in history[:5]])
    before = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_the_loss_is_the_mean_over_completion_tokens_and_micro_batches_do_not_change_it(model_dir, tmp_path):
    examples = reversals(6)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    losses = []
    for prompt, completion in examples:
        labels = torch.tensor([[-100] * len(prompt) + completion])
        output = model(input_ids=torch.tensor([prompt + completion]), labels=labels)
        losses += [output.loss.item()] * len(completion)
    total = sum(len(prompt) + len(completion) for prompt, completion in examples)
    one_step = {"steps": 1, "lr": 1e-3, "batch_tokens": total, "device": "cpu"}
    for row_tokens in (10_000, 12):
        (step,) = sft(model_dir, examples, out_dir=tmp_path / "out", row_tokens=row_tokens, **one_step)
        assert step.loss == pytest.approx(np.mean(losses), abs=1e-5)


def test_the_same_seed_gives_the_same_history(model_dir, tmp_path):
    def losses(seed):
        history = sft(model_dir, reversals(), out_dir=tmp_path / "out", seed=seed, **ARGUMENTS | {"steps": 4})
        return [step.loss for step in history]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_every_step_is_told_and_the_rate_rises_then_falls(model_dir, tmp_path):
    steps = []
    arguments = ARGUMENTS | {"steps": 40, "lr": 1e-3}
    sft(model_dir, reversals(), out_dir=tmp_path / "out", on_step=steps.append, **arguments)
    assert [step.step for step in steps] == list(range(40))
    falling = [(40 - step) / 39 for step in range(1, 40)]
    assert [step.lr / 1e-3 for step in steps] == pytest.approx([0.5, *falling])
    assert all(0 < step.tokens <= 200 for step in steps)


@pytest.mark.parametrize("examples", [[], [([], [1])], [([1], [])]])
def test_examples_without_tokens_are_refused(model_dir, tmp_path, examples):
    with pytest.raises(DataError):
        sft(model_dir, examples, out_dir=tmp_path / "out", **ARGUMENTS)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (0, r"step 1 of 30: loss nan.* Nothing was saved.\n.*The model gives that before any update"),
        (3, r"step 4 of 30: loss nan.* Nothing was saved.\n.*Lower `lr` \(0.003\)"),
        (
            30,
            r"after step 30 these weights are not finite: .*embed_tokens.* Nothing was saved.\n.*Lower `lr`",
        ),
    ],
)
def test_numbers_that_are_not_finite_end_it_with_the_step_and_nothing_is_saved(
    model_dir, tmp_path, monkeypatch, after, message
):
    model = load_model(model_dir, torch.device("cpu"))

    def spoil(step):
        if step is None or step.step + 1 == after:
            model.model.embed_tokens.weight.data.fill_(float("inf"))

    monkeypatch.setattr("millrace.sft.supervised.load_model", lambda *which: model)
    if not after:
        spoil(None)
    with pytest.raises(TrainingError, match=message):
        sft(model_dir, reversals(), out_dir=tmp_path / "out", on_step=spoil, **ARGUMENTS)
    assert not (tmp_path / "out").exists()


def test_an_unknown_optimizer_is_named(model_dir, tmp_path):
    with pytest.raises(ValueError, match="'adam'"):
        sft(model_dir, reversals(), out_dir=tmp_path / "out", optimizer="adam", **ARGUMENTS)
