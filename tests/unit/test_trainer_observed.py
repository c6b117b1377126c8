"""Observed tokens have no log-prob and no version, and change nothing that is computed of the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_algorithms_presets import MAX_TOKENS, PRESETS, large_batch
from tests.long import few
from trainer_doubles import choosing, make_batch, make_trainer, observed, role_config, weights_of

from millrace.algorithms import build
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.controller.step_event import StepFields
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.flat_batch import flatten

MORE = {
    "kl": PolicyGradient(kl=0.1),
    "kl in the reward": PolicyGradient(kl=0.1, kl_in="reward"),
    "by sequence": PolicyGradient(normalize="sequence", correction_of="sequence"),
    "overlong": PolicyGradient(overlong=0.5),
}


@pytest.mark.parametrize("kind", few([*MORE, *PRESETS], 14))
def test_observed_tokens_change_no_step(kind, tmp_path):
    algorithm = build(MORE[kind] if kind in MORE else PRESETS[kind]())
    steps, weights = [], []
    for batch in observed(large_batch()):
        more = {"max_tokens": MAX_TOKENS, "minibatches": 2, "epochs": 2}
        trainer = make_trainer(algorithm, reference=algorithm.needs_reference, **more)
        trainer.version = batch.version
        steps.append(trainer.step(batch, rejected_dir=tmp_path))
        weights.append(weights_of(trainer))
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    seen, plain = steps
    assert seen.metrics == plain.metrics
    assert (seen.logprob_gap, seen.trained_tokens) == (plain.logprob_gap, plain.trained_tokens)
    assert all(map(math.isfinite, seen.metrics.values()))
    assert set(seen.logprob_gap) <= {0, 1} and all(map(math.isfinite, np.ravel([*seen.logprob_gap.values()])))


def test_observed_tokens_change_no_step_with_token_masks(tmp_path):
    found = []
    for batch in observed(choosing(make_batch())):
        trainer = make_trainer(PolicyGradient(kind="ppo"))
        found.append((trainer.step(batch, rejected_dir=tmp_path).metrics, weights_of(trainer)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_the_fields_of_a_step_count_sampled_tokens(tmp_path):
    batch, _ = observed(make_batch(version=1))
    trainer = make_trainer()
    trainer.version = 1
    fields = StepFields().of(batch, trainer.step(batch, rejected_dir=tmp_path))
    trained = sum(sum(s.mask) for group in batch.groups for s in group.sequences)
    assert sum(fields["staleness_histogram"].values()) == fields["trained_tokens"] == trained
    assert set(fields["staleness_histogram"]) == {0, 1} and fields["staleness_max"] == 1
    assert all(map(math.isfinite, [*fields["lengths"].values(), *fields["metrics"].values()]))


def episode(tid: int, reward: float, *turns: int, **metrics: float) -> TrainSequence:
    """Turns of so many tokens, with two observed tokens between each and the next one."""
    columns = TokenColumns()
    for number, length in enumerate(turns):
        if number:
            columns.observe([8, 9])
        columns.extend(TokenColumns.of([5] * length, [-1.0] * length, 0))
    return TrainSequence(tid, columns, reward, False, columns.sampled(), metrics)


def flat_of(algorithm: PolicyGradient, *members: TrainSequence, max_tokens: int = 4):
    return flatten(Batch(0, [TrainGroup(0, [7], list(members))]), build(algorithm), max_tokens=max_tokens)


def test_turns_have_the_advantages_of_their_rewards():
    """As worked by hand in `test_two_turns_worked_by_hand`, with the columns that a run has."""
    algorithm = PolicyGradient(kind="mt_grpo", scale="none")
    flat = flat_of(algorithm, episode(0, 1.0, 2, 1, turn_1=0.0), episode(1, 0.0, 1, 1, turn_1=3.0))
    trained = flat.weights_C > 0
    assert flat.advantages_C[trained].tolist() == [-1, -1, 0.5, 1, -0.5]
    assert trained.tolist() == [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2 + [True]


@pytest.mark.parametrize(
    ("normalize", "due"), [("sequence", [1 / 6, 1 / 4]), ("token", [1 / 5] * 2), ("max_tokens", [1 / 8] * 2)]
)
def test_a_length_counts_sampled_tokens(normalize, due):
    flat = flat_of(PolicyGradient(normalize=normalize), episode(0, 1.0, 2, 1), episode(1, 0.0, 1, 1))
    weights = flat.weights_C[flat.weights_C > 0]
    assert weights.tolist() == pytest.approx([due[0]] * 3 + [due[1]] * 2)


@pytest.mark.parametrize(
    ("own", "due"), [({"turns": 1}, 10), ({"turns": 3}, 30), ({"turns": 9}, 64), ({"episode_tokens": 25}, 25)]
)
def test_the_budget_of_a_trajectory_is_that_of_its_turns(own, due):
    config = Config.model_validate(
        role_config(
            "model",
            reward={"kind": "environment", "path": "acting.py:Acting", **own},
            sampling={"max_tokens": 10},
            rollout={"max_sequence_tokens": 64},
        )
    )
    assert config.completion_tokens_max == due


def test_an_episode_is_overlong_near_the_budget_of_all_its_turns():
    members = episode(0, 1.0, 4, 4, 4), episode(1, 1.0, 1), episode(2, 0.0, 1)
    flat = flat_of(PolicyGradient(overlong=0.5, scale="none"), *members, max_tokens=12)
    long, short = flat.advantages_C[0], flat.advantages_C[-2]
    assert (long, short) == pytest.approx((-1 / 3, 2 / 3))  # rewards 0, 1 and 0
    flat = flat_of(PolicyGradient(overlong=0.5, scale="none"), *members, max_tokens=24)
    assert flat.advantages_C[0] == flat.advantages_C[-2]
