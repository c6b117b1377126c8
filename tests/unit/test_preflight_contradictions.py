"""Configurations that cannot be right are refused with a remedy, unless somebody means them."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.checks.preflight import contradictions
from millrace.config.inert import idle
from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.config.tree import union_kinds

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}
UNCORRECTED = {"algorithm": {"kind": "grpo", "correction": None}}


def contradictions_of(**changes: Any) -> list[str]:
    return contradictions(validate(Config, BASE | changes, {}))


def test_stale_tokens_that_nothing_corrects_are_refused() -> None:
    (message,) = contradictions_of(**UNCORRECTED, schedule={"kind": "areal", "eta": 4})
    assert message.startswith('`algorithm.correction` ("none"): tokens are up to 4 versions old')
    assert message.endswith('Set it to 2.0, or say that you mean it: `allow = ["uncorrected"]`')
    assert contradictions_of(**UNCORRECTED, schedule={"kind": "areal", "eta": 4}, allow=["uncorrected"]) == []


@pytest.mark.parametrize(
    ("rounded", "said"),
    [
        (
            {"rollout": {"engine": "vllm", "quantization": "fp8"}},
            'replicas sample with rounded weights (`rollout.quantization` "fp8")',
        ),
        (
            {"trainer": {"quantization": "fp8"}},
            'the trainer computes with rounded weights (`trainer.quantization` "fp8")',
        ),
    ],
)
def test_tokens_of_rounded_weights_that_nothing_corrects_are_refused_at_every_age(
    rounded: dict[str, Any], said: str
) -> None:
    rounded = rounded | {"schedule": {"kind": "synchronous"}}
    assert contradictions_of(**rounded) == []
    (message,) = contradictions_of(**UNCORRECTED, **rounded)
    assert said in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        UNCORRECTED | {"schedule": {"kind": "synchronous"}},
        {"algorithm": {"kind": "aipo"}},
        {"algorithm": {"kind": "grpo", "correction": None, "second_moment": 0.04}},
        {"algorithm": {"kind": "function", "path": "own.py:own"}},
        {"sampling": {"banned_token_ids": [0], "temperature": 0.7}},
    ],
)
def test_what_is_right_is_not_refused(changes: dict[str, Any]) -> None:
    assert contradictions_of(**changes) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adapter": {"alpha": 16.0}}, "`adapter.alpha` (16.0) changes nothing: it needs `adapter.rank`"),
        ({"optimizer": {"lr_end": 0.1}}, "`optimizer.lr_end` (0.1)"),
        (
            {"rollout": {"draft_tokens": 8}},
            "`rollout.draft_tokens` (8) changes nothing: it needs `rollout.drafts`",
        ),
        ({"rollout": {"drafts": "ngram", "draft_model": "m"}}, "`rollout.draft_model` (m)"),
        ({"algorithm": {"kind": "aipo", "clip_high": 0.3}}, "`algorithm.clip_high` (0.3)"),
        ({"algorithm": {"kind": "grpo", "rho": 2.0}}, "`algorithm.rho` (2.0)"),
        ({"algorithm": {"kind": "grpo", "value_lr": 0.1}}, "`algorithm.value_lr` (0.1)"),
        ({"algorithm": {"kind": "grpo", "teacher_weight": 0.1}}, "`algorithm.teacher_weight` (0.1)"),
        ({"algorithm": {"kind": "grpo", "proximal": "interpolate"}}, "`algorithm.proximal` (interpolate)"),
    ],
)
def test_a_key_that_changes_nothing_is_told(changes: dict[str, Any], named: str) -> None:
    (message,) = idle(validate(Config, BASE | changes, {}))
    assert message.startswith(named)


@pytest.mark.parametrize("kind", [kind for kind in union_kinds(Config.model_fields["algorithm"])])
def test_no_preset_has_a_key_that_changes_nothing(kind: str) -> None:
    algorithm = {"kind": kind} | ({"path": "own.py:own"} if kind == "function" else {})
    several = {"minibatches": 2, "epochs": 2}
    adapter = {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    assert idle(validate(Config, BASE | {"algorithm": algorithm}, {})) == []
    used = {"algorithm": algorithm, "batch": several, "adapter": adapter}
    assert idle(validate(Config, BASE | used, {})) == []


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.05)])
def test_cut_sampling_that_the_trainer_knows_nothing_of_is_refused(key: str, value: float) -> None:
    assert contradictions_of(sampling={key: value}) == []
    blind: dict[str, Any] = {
        "`sampling.token_masks` to true": {"sampling": {key: value, "token_masks": False}},
        '`rollout.engine` to "own"': {"sampling": {key: value}, "rollout": {"engine": "vllm"}},
    }
    for remedy, changes in blind.items():
        (message,) = contradictions_of(**changes)
        assert message.startswith(f"`sampling.{key}` ({value})")
        assert remedy in message and '`allow = ["cut_sampling"]`' in message
        assert contradictions_of(**changes, allow=["cut_sampling"]) == []
