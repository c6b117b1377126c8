"""What an algorithm cannot do in a run, told before the run; and the trainer that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_algorithms_presets import PRESETS, large_batch, tables
from trainer_doubles import make_trainer

from millrace.config.inert import inert
from millrace.config.load import validate
from millrace.config.schema import Config

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}
STALE = {"schedule": {"kind": "areal", "eta": 4}}
SYNCHRONOUS = {"schedule": {"kind": "synchronous"}}
WITHOUT = {"`algorithm.clip`": {"clip": "none", "clip_dual": None}, "`algorithm.ratio`": {"ratio": "token"}}


def inert_text(kind: str, **changes: Any) -> str:
    return "\n".join(inert(validate(Config, BASE | {"algorithm": {"kind": kind}} | changes, {})))


def first_gradient(algorithm: Any, *, stale: bool) -> Any:
    """Of the first optimizer step of a batch, with a table in place of a model."""
    batch = large_batch()
    old, _ = tables(batch)
    mu = np.concatenate([np.asarray(s.columns.logprobs, float) for g in batch.groups for s in g.sequences])
    table = torch.tensor(old if stale else mu, requires_grad=True)
    trainer = make_trainer(algorithm, dtype=torch.float64, max_tokens=20)
    trainer._forward = lambda row, reference=False: (table[row.flat_N], torch.zeros(len(row.flat_N)))
    trainer._accumulate(trainer._prepared(batch, 1), 0, 0.0)
    return table.grad.numpy()


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("stale", [True, False], ids=["asynchronous", "synchronous"])
def test_exactly_what_changes_no_gradient_is_told(kind: str, stale: bool) -> None:
    said = inert_text(kind, **(STALE if stale else SYNCHRONOUS))
    preset = PRESETS[kind]()
    whole = first_gradient(preset, stale=stale)
    parts = WITHOUT | {
        f"`algorithm.{key}`": {key: None} for key in ("second_moment", "drift") if getattr(preset, key)
    }
    for name, without in parts.items():
        changed = preset.model_copy(update=without)
        if changed != preset:
            unchanged = np.allclose(first_gradient(changed, stale=stale), whole, rtol=1e-6, atol=1e-12)
            assert unchanged == (name in said), name


def test_the_key_that_makes_it_act_is_named() -> None:
    (line,) = inert(validate(Config, BASE | STALE | {"algorithm": {"kind": "dapo"}}, {}))
    assert line.startswith('`algorithm.clip` ("ppo") changes nothing: a batch gets one optimizer step')
    assert "Set `batch.minibatches` to 2 or more" in line
    assert (
        inert_text("dapo", **STALE, batch={"minibatches": 2})
        == inert_text("dapo", **STALE, batch={"epochs": 2})
        == ""
    )


def test_an_asynchronous_run_without_a_ratio_of_a_sequence_says_so() -> None:
    said = inert_text("gspo", **STALE)
    assert '`algorithm.ratio` ("sequence") and `algorithm.clip` ("ppo") change nothing' in said
    assert "tokens of older policies count by `algorithm.correction` (2), each by its own ratio" in said
    assert '`algorithm.anchor` to "behavior" and `algorithm.correction` to "none"' in said
    algorithm = {"kind": "gspo", "anchor": "behavior", "correction": None}
    assert inert(validate(Config, BASE | STALE | {"algorithm": algorithm}, {})) == []
    assert "older policies" not in inert_text("gspo", **SYNCHRONOUS)


def test_what_looks_at_older_policies_alone_says_that_there_are_none() -> None:
    assert "`algorithm.second_moment` (0.04)" in inert_text("m2po", **SYNCHRONOUS, batch={"epochs": 2})
    assert "schedule" in inert_text("m2po", **SYNCHRONOUS)
    assert inert_text("m2po", **STALE) == ""
    assert "`algorithm.drift` (0.1)" in inert_text("deepseek_v32", **SYNCHRONOUS)
    assert inert_text("deepseek_v32", **SYNCHRONOUS, batch={"epochs": 2}) == ""


def test_an_own_algorithm_is_not_judged() -> None:
    assert inert(validate(Config, BASE | {"algorithm": {"kind": "function", "path": "a.py:b"}}, {})) == []


def test_a_share_of_sequences_without_an_environment_is_told() -> None:
    (line,) = inert(
        validate(Config, BASE | STALE | {"algorithm": {"clip": "none", "sequence_share": 0.5}}, {})
    )
    assert line.startswith("`algorithm.sequence_share` (0.5) changes nothing")


def test_of_an_algorithm_that_nobody_chose_nothing_is_told() -> None:
    assert inert(validate(Config, BASE, {})) == []
    assert inert(validate(Config, BASE | {"algorithm": {"clip": "ppo"}}, {})) != []
