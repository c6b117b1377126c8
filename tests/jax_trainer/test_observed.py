"""Observed tokens have no log-prob and no version, and change nothing that JAX computes of the others."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest
from test_algorithms_presets import PRESETS, large_batch
from test_presets import few_shapes, make_policy  # noqa: F401 - the fixture is for every test
from trainer_doubles import choosing, observed

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient


@pytest.mark.parametrize("kind", [*PRESETS, "kl"])
def test_observed_tokens_change_no_gradient_and_no_metric(kind: str, tmp_path: Path) -> None:
    algorithm = build(PolicyGradient(kl=0.1) if kind == "kl" else PRESETS[kind]())
    policy = make_policy(tmp_path, algorithm, reference=algorithm.needs_reference)
    found = []
    for batch in observed(choosing(large_batch())):
        policy.forget_gradient()
        prepared = policy._prepared(batch, 1)
        summary = policy._accumulate(prepared, 0, 0.0)
        statistics = prepared.statistics.read()
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(policy.gradient)]
        found.append((summary, leaves, statistics.metrics(), statistics.logprob_gap()))
    (seen, seen_leaves, *seen_statistics), (plain, plain_leaves, *plain_statistics) = found
    assert seen == plain and math.isfinite(seen.loss)
    assert seen_statistics == plain_statistics and all(map(math.isfinite, seen_statistics[0].values()))
    assert any(leaf.any() for leaf in seen_leaves)
    for one, other in zip(seen_leaves, plain_leaves, strict=True):
        np.testing.assert_array_equal(one, other)
