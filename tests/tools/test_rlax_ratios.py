"""RLAX's two claims at small sizes: more rollout cores, and preemptions (`benchmarks/published/rlax.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.published import rlax
from tests.long import long

STRONG = rlax.Size(
    trainer_chips=64, prompts=64, group_size=8, slots=8, steps=7, median=500.0, max_tokens=4000
)
WEAK = replace(STRONG, trainer_chips=8)
SHORT = replace(WEAK, prompts=8, steps=24)


@long
def test_eight_times_the_rollout_cores_are_about_eight_times_the_rollouts_while_generation_binds():
    one, eight = rlax.scaled(STRONG, 1), rlax.scaled(STRONG, 8)
    assert rlax.cores(8) == 8 * rlax.cores(1)
    assert 6.5 < eight.generated_tokens_per_s / one.generated_tokens_per_s < 8.5
    assert eight.trainer_busy < rlax.BOUND


@long
def test_where_the_trainer_binds_more_rollout_cores_gain_nothing():
    few, many = rlax.scaled(WEAK, 8), rlax.scaled(WEAK, 16)
    assert few.trainer_busy > rlax.BOUND
    assert many.trained_tokens_per_s == pytest.approx(few.trained_tokens_per_s, rel=0.05)
    assert many.replica_busy < few.replica_busy


@long
@pytest.mark.parametrize("kind", rlax.KINDS)
def test_a_run_survives_preemptions_and_keeps_goodput(kind):
    run = rlax.disturbed(SHORT, 4, kind, 600.0)
    assert run.preemptions >= 1
    if kind == "replica":
        assert 0.9 < run.goodput < 1.05 and run.replayed == 0  # a step is lost only with the trainer
    else:
        assert 0.2 < run.goodput < 0.95 and run.replayed > 0


def test_without_a_preemption_nothing_is_lost():
    run = rlax.disturbed(replace(SHORT, steps=6), 2, "run", 1e9)
    assert (run.preemptions, run.replayed) == (0, 0)
    assert run.goodput == pytest.approx(1.0, abs=1e-6)


def test_the_same_seed_preempts_at_the_same_times_and_another_seed_at_others():
    first, again, other = (rlax.preemptions("run", 3600.0, replicas=1, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    with pytest.raises(ValueError, match="replica, trainer, run"):
        rlax.preemptions("relay", 3600.0, replicas=1, seed=0)
