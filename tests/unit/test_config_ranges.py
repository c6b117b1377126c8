"""No configuration is accepted that cannot learn, and none ends in a traceback."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import long

from millrace.algorithms import TokenLogprobs
from millrace.algorithms import build as build_algorithm
from millrace.algorithms.logprobs import DenseSequences
from millrace.config.load import parse_value, validate
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS
from millrace.config.tree import leaves
from millrace.core.errors import ConfigError
from millrace.schedule.presets import build as build_schedule
from millrace.trainer.optimizer import make_adamw

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}


def is_of_grpo(key: str, kind: str | None) -> bool:
    """The same key of `grpo` is tried."""
    name = key.rpartition(".")[2]
    return kind in PRESETS and kind != "grpo" and name not in ("kind", *PRESETS[kind].defaults)


LEAVES = [(key, kind) for key, kind, _ in leaves(Config) if not is_of_grpo(key, kind)]
UNCHANGEABLE = {"task": {"name": "x", "path": "x"}, "reward": {"path": "x"}, "algorithm": {"path": "x"}}

hostile_numbers = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0, -1, 0.0, -1.0, 1e-300, 1e300, 2**31, 2**63, -(2**63)]),
    st.sampled_from([10**40, 1e-5, 1.5, 0.999999, 1, 2, 3]),
    st.floats(),
    st.integers(),
)
hostile_values = st.one_of(
    hostile_numbers,
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.lists(st.one_of(hostile_numbers, st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=5), hostile_numbers, max_size=2),
)


def tree_with(key: str, kind: str | None, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(BASE))
    *tables, name = key.split(".")
    inner = tree
    for table in tables:
        inner = inner.setdefault(table, {})
    if kind is not None:
        needed = {
            k: v for k, v in UNCHANGEABLE.get(tables[0], {}).items() if (f"{tables[0]}.{k}", kind) in LEAVES
        }
        inner.clear()
        inner |= {"kind": kind, **needed}
    inner[name] = value
    if tables == ["task"] and kind != "gym":
        tree["reward"] = {"kind": "function", "path": "x"}
    return tree


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers_in(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers_in(inner)]
    return [value] if isinstance(value, int | float) else []


def step_along_the_gradient(config: Config) -> float:
    """How far one step moves the log-prob of a token whose advantage is 1."""
    weight = torch.nn.Parameter(torch.tensor([-1.0]))
    optimizer, limit = make_adamw([weight], config.optimizer), config.optimizer.grad_clip
    fixed = weight.detach()
    sequences, algorithm = DenseSequences.of(torch, [0], fixed), build_algorithm(config.algorithm)
    logprobs = TokenLogprobs(weight, fixed, fixed, fixed, fixed, sequences, fixed)
    algorithm.objective(torch, logprobs, torch.ones(1)).sum().backward()
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([weight], limit)
    optimizer.step()
    return weight.item() + 1.0


def assert_sound(config: Config) -> None:
    plain = config.model_dump(mode="json")
    free = plain["task"].pop("options", None)
    assert all(math.isfinite(n) and abs(n) <= 2**63 for n in numbers_in(plain)), (free, plain)
    assert all(config.sampling.stop) or not config.sampling.stop
    if config.algorithm.kind != "function":
        moved = step_along_the_gradient(config)
        assert math.isfinite(moved)
        assert moved >= -1e-6
    np.random.default_rng([config.seed])
    torch.tensor([0.0, 1.0]).div(config.sampling.temperature).softmax(0)
    if config.schedule.kind != "function":
        build_schedule(config)


every_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=[f"{key}-{kind or ''}" for key, kind in LEAVES])


@every_leaf
@settings(max_examples=8, deadline=None, derandomize=True)
@given(value=hostile_values)
def test_a_hostile_value_is_refused_by_name_or_does_no_harm(leaf: tuple[str, str | None], value: Any) -> None:
    refused_by_name_or_harmless(*leaf, value)


@long
@every_leaf
@settings(max_examples=50, deadline=None, derandomize=True)
@given(value=hostile_values)
def test_more_hostile_values_are_refused_by_name_or_do_no_harm(
    leaf: tuple[str, str | None], value: Any
) -> None:
    refused_by_name_or_harmless(*leaf, value)


def refused_by_name_or_harmless(key: str, kind: str | None, value: Any) -> None:
    try:
        config = validate(Config, tree_with(key, kind, value), {})
    except ConfigError as error:
        assert key.split(".")[0] in str(error)
    else:
        assert_sound(config)


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_a_reward_that_compares_needs_an_answer(reward: str) -> None:
    task = {"kind": "file", "path": "x", "answer": None}
    with pytest.raises(ConfigError, match=rf'"{reward}" compares with an answer, and `task.answer`'):
        validate(Config, BASE | {"task": task, "reward": {"kind": reward}}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.grad_clip", "-1"),
        ("optimizer.grad_clip", "0"),
        ("optimizer.grad_clip", "nan"),
        ("optimizer.lr", "inf"),
        ("optimizer.lr", "-1e-3"),
        ("optimizer.betas", "[1.5, 0.9]"),
        ("optimizer.betas", "[0.9, 1.0]"),
        ("optimizer.eps", "1e-300"),
        ("optimizer.weight_decay", "inf"),
        ("algorithm.correction", "-1"),
        ("algorithm.correction", "0"),
        ("algorithm.kl", "inf"),
        ("algorithm.clip_low", "nan"),
        ("sampling.temperature", "inf"),
        ("sampling.temperature", "0"),
        ("sampling.temperature", "1e-30"),
        ("sampling.stop", '[""]'),
        ("schedule.staleness_max", "-1"),
        ("schedule.round_groups", "0"),
        ("rollout.report_interval_s", "inf"),
        ("rollout.slots", "10000000000000000000000"),
        ("batch.prompts", "10000000000"),
        ("checkpoints.every", "10000000000"),
        ("supervision.heartbeat_timeout_s", "inf"),
        ("supervision.heartbeat_timeout_s", "1e-9"),
        ("supervision.stall_s", "nan"),
        ("seed", "-1"),
    ],
)
def test_a_value_that_would_teach_nothing_is_refused_with_its_range(key: str, value: str) -> None:
    kind = {"algorithm": "grpo", "schedule": "laminar"}.get(key.split(".")[0])
    with pytest.raises(ConfigError, match=rf"`{key}.*must"):
        validate(Config, tree_with(key, kind, parse_value(value)), {})
