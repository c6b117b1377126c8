"""What one device in turns goes together with."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.rollout.engine_kinds import ENGINES, refuse_unable

WHOLE = {
    "model": {"path": "model"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
    "schedule": {"kind": "synchronous"},
    "rollout": {"colocated": True},
}


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "synchronous"},
        {"kind": "areal", "eta": 0},
        {"kind": "areal", "eta": 1},
        {"kind": "llamarl", "lag": 1},
        {"kind": "millrace", "staleness_max": 0},
    ],
)
def test_staleness_0_and_partial_rollouts_at_staleness_1_are_accepted(schedule):
    assert Config.model_validate(WHOLE | {"schedule": schedule}).rollout.colocated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": {"kind": "areal", "eta": 4}}, "at most 1 version old"),
        ({"schedule": {"kind": "laminar", "staleness_max": None}}, "staleness bound none"),
        ({"schedule": {"kind": "laminar", "staleness_max": 1}}, "a trajectory has one version"),
        ({"rollout": {"colocated": True, "servers": ["http://here:1"]}}, "devices of their own"),
        ({"evaluations": [{"name": "held-out", "every": 10}]}, "the evaluator"),
        ({"algorithm": {"kind": "grpo", "kl": 0.1, "reference": "replica"}}, '"replica"'),
        ({"runtime": {"kind": "local", "hosts": 2}}, "one host"),
        ({"runtime": {"kind": "ray"}}, "one host"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(changes, message):
    with pytest.raises(ValidationError, match=r"`rollout\.colocated`") as refused:
        Config.model_validate(WHOLE | changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("engine", ["own", "vllm"])
def test_an_engine_that_can_sleep_is_taken(engine):
    refuse_unable(Config.model_validate(WHOLE | {"rollout": {"colocated": True, "engine": engine}}))


def test_an_engine_that_cannot_sleep_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(ENGINES, "vllm", ENGINES["vllm"]._replace(can=ENGINES["server"].can))
    rollout = {"colocated": True, "engine": "vllm"}
    config = Config.model_validate(WHOLE | {"rollout": rollout})
    with pytest.raises(ConfigError, match=r"\(vllm\) cannot do `rollout.colocated` \(True\)"):
        refuse_unable(config)
