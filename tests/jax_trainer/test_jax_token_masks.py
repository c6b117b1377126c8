"""Token masks in JAX renormalise log-probs as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mesh_doubles import mesh_policy, uneven_batch
from test_frozen import assert_equal_weights
from test_presets import few_shapes, make_policy  # noqa: F401 - the fixture is for every test
from trainer_doubles import VOCAB, choosing, make_batch, make_trainer, tiny_model

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.trainer.recorded import TokenMasks
from millrace_jax import gradients
from millrace_jax.gradients import mask_arrays


@pytest.mark.parametrize("chunk", [None, 32], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_steps_with_masks_are_those_of_torch(
    kind: str, chunk: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        monkeypatch.setattr(gradients, "CHUNK_LOGITS", chunk * VOCAB)
    algorithm = build(PolicyGradient(kind=kind, kl=0.1))
    changes: dict[str, Any] = {
        "optimizer": Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1),
        "max_tokens": 20,
        "minibatches": 2,
        "temperature": 0.8,
    }
    trainer = make_trainer(algorithm, reference=True, **changes)
    policy = make_policy(tmp_path, algorithm, reference=True, **changes)
    for version in range(2):
        batch = choosing(make_batch(version, groups=4))
        due, found = (each.step(batch, rejected_dir=tmp_path) for each in (trainer, policy))
        for name, value in due.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (version, name)
    assert_equal_weights(policy, trainer)


def test_masks_change_what_is_trained(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, build(PolicyGradient()))
    losses = [policy.accumulate(batch).loss for batch in (make_batch(), choosing(make_batch()))]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices")
def test_masks_on_a_mesh_are_those_of_one_device(tmp_path: Path) -> None:
    tiny_model("gemma3, capped").save_pretrained(tmp_path)
    due, found = mesh_policy(tmp_path, 1, (1, 1, 1)), mesh_policy(tmp_path, 8, (2, 2, 2))
    for each in (due, found):
        each.accumulate(choosing(uneven_batch(0)))
    for one, other in zip(jax.tree.leaves(found.gradient), jax.tree.leaves(due.gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_entries_of_a_row_follow_its_tokens() -> None:
    masks = TokenMasks(np.array([2, 0, 1]), np.array([5, 7, 9], np.int32))
    arrays = mask_arrays(masks, np.array([[2, -1, 0], [1, -1, -1]]))
    assert arrays is not None
    assert arrays.cut_RN.tolist() == [[True, False, True], [False] * 3]
    assert arrays.places_RK[:, :4].tolist() == [[0, 2, 2, 3], [3, 3, 3, 3]]
    assert arrays.tokens_RK[0, :3].tolist() == [9, 5, 7]
    assert mask_arrays(None, np.zeros((1, 1), np.int64)) is None
