"""What a step tells of how far its tokens are from the policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from trainer_doubles import make_batch, make_trainer, sequence_logprobs, tiny_model

from millrace.config.tables.algorithms import PolicyGradient
from millrace.trainer.metrics import importance_metrics


def test_weights_that_are_equal_leave_every_token():
    found = importance_metrics(np.zeros(5), np.array([0, 0, 1, 3, 9]))
    assert {name for name in found if name.startswith("ess")} == {
        *("ess", "ess_age_0", "ess_age_1", "ess_age_2", "ess_age_8"),
    }
    assert all(found[name] == pytest.approx(1.0) for name in found if name.startswith("ess"))
    assert all(found[name] == 0.0 for name in found if name.startswith("kl_behavior"))


def test_effective_tokens_and_divergence_worked_by_hand():
    # w = 1, 1, 4 and 1 / 2: (6.5)^2 / (4 x 18.25)
    found = importance_metrics(np.log([1.0, 1.0, 4.0, 0.5]), np.array([0, 0, 5, 7]))
    assert found["ess"] == pytest.approx(6.5**2 / (4 * 18.25))
    assert found["ess_age_0"] == pytest.approx(1.0)
    assert found["ess_age_4"] == pytest.approx(4.5**2 / (2 * 16.25))
    assert found["kl_behavior_age_4"] == pytest.approx(((3 - math.log(4)) + (math.log(2) - 0.5)) / 2)
    assert found["importance_p99"] == pytest.approx(np.quantile([1, 1, 4, 0.5], 0.99))


def test_a_weight_beyond_all_bounds_stays_finite():
    found = importance_metrics(np.array([0.0, 1e4, -1e4]), np.array([0, 0, 0]))
    assert all(math.isfinite(value) for value in found.values())
    assert found["ess"] == pytest.approx(1 / 3, rel=1e-3)


def test_tokens_without_a_gradient_are_told(tmp_path):
    batch = make_batch(version=0)
    assert make_trainer().step(batch, rejected_dir=tmp_path).metrics["silenced"] == 0.0
    dropping = PolicyGradient(kind="icepop", correction=1.0, correction_low=0.999)
    assert make_trainer(dropping).step(batch, rejected_dir=tmp_path).metrics["silenced"] > 0.9
    tight = PolicyGradient(clip_low=1e-4, clip_high=1e-4)
    silenced = make_trainer(tight, epochs=4).step(batch, rejected_dir=tmp_path).metrics["silenced"]
    assert 0.1 < silenced < 0.75  # of the first of four steps: none


def test_a_penalty_hides_no_token_that_a_clip_silenced(tmp_path):
    batch, tight = make_batch(version=0), {"clip_low": 1e-4, "clip_high": 1e-4}
    plain = (
        make_trainer(PolicyGradient(**tight), epochs=4).step(batch, rejected_dir=tmp_path).metrics["silenced"]
    )
    with_kl = make_trainer(PolicyGradient(kl=1e-6, **tight), epochs=4, reference=True).step(
        batch, rejected_dir=tmp_path
    )
    assert with_kl.metrics["silenced"] == pytest.approx(plain, abs=0.05)
    assert plain > 0.1
    dropping = PolicyGradient(kind="icepop", kl=0.1, correction=1.0, correction_low=0.999)
    assert make_trainer(dropping, reference=True).step(batch, rejected_dir=tmp_path).metrics["silenced"] > 0.9


@pytest.mark.parametrize(
    ("algorithm", "of_sequence"),
    [
        (PolicyGradient(kind="sequence_tis", correction=1.0), np.sum),
        (PolicyGradient(kind="cispo", ratio="sequence", rho=1.0), np.mean),
    ],
)
def test_weights_of_sequences_are_counted_as_they_are_capped(algorithm, of_sequence, tmp_path):
    trainer, batch = make_trainer(algorithm), make_batch(version=1)
    found = trainer.step(batch, rejected_dir=tmp_path).metrics["importance_capped"]
    cap = math.log(algorithm.correction or algorithm.rho)
    above = total = 0
    for group in batch.groups:
        for s in group.sequences:
            now = sequence_logprobs(tiny_model(attention="eager"), group.prompt, s.columns.tokens.tolist())
            ratio = (now.detach().numpy() - np.asarray(s.columns.logprobs))[np.flatnonzero(s.mask)]
            total += len(ratio)
            above += len(ratio) * bool(len(ratio) and of_sequence(ratio) > cap)
    assert 0 < above < total
    assert found == pytest.approx(above / total)
