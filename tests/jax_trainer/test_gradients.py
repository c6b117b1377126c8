"""The trainer in JAX gives the losses, log-probs and gradients of the trainer in torch, on the same batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_algorithms_sequences import episodes
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.gradients import rows_gradient, sequences, tokens_of
from millrace_jax.row_arrays import arrays_of
from millrace_jax.weights import read_weights, shapes, slices

FAMILIES = [
    "qwen3", "qwen2", "qwen2, windows", "gemma3", "gemma3, capped", "gemma2", "llama", "llama, llama3 rope",
    "mistral", "mistral, yarn, no windows",
]  # fmt: skip


def loss_and_gradient(path: Path, algorithm: Any, batch: Any, budget: int) -> tuple[float, dict[str, Any]]:
    shape = read_architecture(path)
    weights = read_weights(path, shape, make_mesh(1, 1, 1, jax.devices()[:1]))
    flat = flatten(batch, algorithm, max_tokens=24)
    options = {"count": sequences(flat), "temperature": 1.0, "recompute": False}
    program = jax.jit(partial(rows_gradient, shape=shape, algorithm=algorithm, **options))
    total, gradient = 0.0, jax.tree.map(jnp.zeros_like, weights)
    for row in pack(flat.minibatches[0], budget):
        arrays = arrays_of([row])
        loss, (of_row, _), *_ = program(weights, None, arrays, tokens_of(flat, arrays, np.float32), 0.0)
        total, gradient = total + float(loss), jax.tree.map(jnp.add, gradient, of_row)
    return total, dict(slices(gradient, shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_torch(family: str, tmp_path: Path) -> None:
    model, algorithm, batch = tiny_model(family), build(PolicyGradient()), make_batch()
    model.save_pretrained(tmp_path)
    summary = make_trainer(algorithm, model=model).accumulate(batch)
    loss, gradient = loss_and_gradient(tmp_path, algorithm, batch, 64)
    named = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert list(named) == list(gradient) == list(shapes(read_architecture(tmp_path)))
    assert loss == pytest.approx(summary.loss, rel=1e-5, abs=1e-6)
    for name, expected in named.items():
        assert np.abs(gradient[name] - expected).max() < 1e-6 * max(1.0, np.abs(expected).max()), name


@pytest.mark.smoke
def test_sequences_of_a_trajectory_have_their_own_advantages_as_in_torch(tmp_path: Path) -> None:
    model, algorithm, batch = tiny_model(), build(PolicyGradient(sequence_share=0.7)), episodes(5)
    model.save_pretrained(tmp_path)
    summary = make_trainer(algorithm, model=model).accumulate(batch)
    loss, gradient = loss_and_gradient(tmp_path, algorithm, batch, 64)
    assert loss == pytest.approx(summary.loss, rel=1e-5, abs=1e-6)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.numpy()
        assert np.abs(gradient[name] - expected).max() < 1e-6 * max(1.0, np.abs(expected).max()), name
