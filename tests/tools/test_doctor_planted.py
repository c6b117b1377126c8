"""Seven faults planted into small real runs, seven right answers; and runs without one."""

from __future__ import annotations

from itertools import count

import pytest
from tests.tools.doctor_worlds import World, even_tokens, make_model, recorded

from millrace.core.types import Failed, Scored
from millrace.diagnose.rules import diagnose

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("doctor") / "model")


def every_fourth_fails():
    calls = count()

    def score(tokens):
        return Failed("score.py raised KeyError: 'x'") if next(calls) % 4 == 0 else even_tokens(tokens)

    return score


def different_tokens(tokens):
    """A policy that collapses loses it."""
    return Scored(len(set(tokens)) / len(tokens))


PLANTED = {
    "wrong-weights": lambda: {"frozen": DOWN, "lr": 3e-3},
    "stale-cache": lambda: {"keeps_cache": True, "lr": 3e-3},
    "numeric-gap": lambda: {"engine_dtype": "bfloat16"},
    "true-staleness": lambda: {"lr": 2e-2, "lag": 4, "steps": 10},
    "failing-rewards": lambda: {"score": every_fourth_fails()},
    "no-signal": lambda: {"score": lambda tokens: Scored(0.0)},
    "diverging-optimizer": lambda: {"score": different_tokens, "lr": 1.0, "grad_clip": None},
}
SHOWS = {
    "wrong-weights": "too large at versions 1, 2, 3",
    "stale-cache": "tokens after a swap have a gap of",
    "numeric-gap": "without a trend",
    "true-staleness": "truncated importance weight",
    "failing-rewards": "32 times: score.py raised KeyError: 'x'",
    "no-signal": "in 100% of the groups of the last 4 steps",
    "diverging-optimizer": "the entropy fell from",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_the_one_answer_and_says_what_shows_it(fault, model, tmp_path):
    findings = diagnose(recorded(World(model, **PLANTED[fault]()), tmp_path / "events.jsonl"))
    assert [finding.fault for finding in findings] == [fault]
    assert SHOWS[fault] in " ".join(findings[0].evidence)
    assert findings[0].advice


HEALTHY = {
    "as it is": {},
    "learning rate 0": {"lr": 0.0},
    "further behind": {"lag": 2},
    "slower": {"lr": 1e-4},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_a_clean_bill(name, model, tmp_path):
    assert diagnose(recorded(World(model, **HEALTHY[name]), tmp_path / "events.jsonl")) == []
