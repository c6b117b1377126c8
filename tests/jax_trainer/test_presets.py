"""All presets give the loss and the gradient of the trainer in torch, and so do whole steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_algorithms_presets import PRESETS, found_gradient, large_batch, tables
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.algorithms import build
from millrace.config.tables.training import Optimizer
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace_jax import row_arrays
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.gradients import Outputs, sequences, token_loss, tokens_of
from millrace_jax.policy import FrozenPolicy, JaxPolicy
from millrace_jax.row_arrays import arrays_of
from millrace_jax.weights import read_weights, slices

MAX_TOKENS = 20


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have one shape, so each program is compiled once."""
    monkeypatch.setattr(row_arrays, "TOKENS_MIN", 256)


def tree_of(path: Path, model: Any) -> tuple[Any, Any]:
    model.save_pretrained(path)
    shape = read_architecture(path)
    return shape, read_weights(path, shape, make_mesh(1, 1, 1, jax.devices()[:1]))


def make_policy(
    path: Path,
    algorithm: Any,
    *,
    reference: bool = False,
    teacher: Any = None,
    mesh: Any = None,
    **changes: Any,
) -> JaxPolicy:
    settings: dict[str, Any] = {
        "optimizer": Optimizer(lr=1e-3, grad_clip=None),
        "token_budget": 4096,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "dtype": jnp.float32,
        "published": jnp.float32,
    }
    shape, weights = tree_of(path / "model", tiny_model())
    frozen = None
    if reference or teacher:
        of_frozen, frozen_weights = tree_of(path / "reference", teacher or tiny_model(seed=1))
        frozen = FrozenPolicy(frozen_weights, of_frozen, jnp.float32)
    settings |= changes
    return JaxPolicy(shape, weights, algorithm, StepSettings(**settings), reference=frozen, mesh=mesh)


@pytest.mark.parametrize("kind", PRESETS)
def test_steps_of_a_preset_are_those_of_torch(kind: str, tmp_path: Path) -> None:
    algorithm = build(PRESETS[kind]())
    changes = {"optimizer": Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1), "max_tokens": MAX_TOKENS}
    changes |= {"minibatches": 2, "epochs": 2, "temperature": 0.8}
    reference = algorithm.needs_reference
    torch_trainer = make_trainer(algorithm, reference=reference, **changes)
    policy = make_policy(tmp_path, algorithm, reference=reference, **changes)
    for version in range(2):
        batch = make_batch(version, groups=4)
        due = torch_trainer.step(batch, rejected_dir=tmp_path)
        found = policy.step(batch, rejected_dir=tmp_path)
        assert set(found.metrics) == set(due.metrics) | {"compilations", "compile_s"}
        for name, value in due.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (version, name)
        assert set(found.logprob_gap) == set(due.logprob_gap)
        assert found.trained_tokens == due.trained_tokens
    expected = {name: x.detach().numpy() for name, x in torch_trainer.model.named_parameters()}
    for name, weight in slices(policy.state.weights, policy.shape):
        np.testing.assert_allclose(weight, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", PRESETS)
def test_the_gradient_of_log_probs_is_that_of_torch_in_float64(kind: str) -> None:
    batch, config = large_batch(), PRESETS[kind]()
    old, pi = tables(batch)
    due = found_gradient(config, batch, old, pi)
    algorithm = build(config)
    with jax.enable_x64(True):
        flat = flatten(batch, algorithm, max_tokens=MAX_TOKENS)
        if algorithm.loss_mask is not None or algorithm.critic is not None or algorithm.penalty is not None:
            pytest.skip("the values and masks of the whole batch are of `BatchStep`: see the test of steps")
        flat.proximal_C[:] = old
        gradient_C = np.zeros(len(old))
        program = jax.jit(
            jax.grad(partial(token_loss, algorithm=algorithm, count=sequences(flat), progress=0.5))
        )
        for row in pack(flat.minibatches[0], 60):
            arrays = arrays_of([row])
            valid = arrays.flat_RN >= 0
            logprobs = np.where(valid, pi[arrays.flat_RN], 0.0)
            outputs = Outputs(logprobs, np.zeros_like(logprobs), np.zeros_like(logprobs))
            gradient = program(outputs, tokens_of(flat, arrays, np.float64))
            gradient_C[arrays.flat_RN[valid]] = np.asarray(gradient.logprobs)[valid]
    np.testing.assert_allclose(gradient_C, due, rtol=1e-9, atol=1e-12)
