"""Splash attention computes what the plain attention computes, for trees, in Pallas' interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_doubles import mesh_policy, named
from trainer_doubles import make_batch, save_tiny_model

from millrace_jax.devices import splash
from millrace_jax.devices.mesh import make_mesh, on_mesh, replicated
from millrace_jax.forward import attention

Array = Any
HEADS, KEY_HEADS, SIZE = 4, 2, 128
INTERPRETED = partial(splash.attention, interpret=True)


def tree(tokens: int) -> tuple[list[int], list[int]]:
    """Ends and positions: a prompt of 60 with three continuations, one of which branches, then padding."""
    ends = [tokens - 26] * 60 + [120] * 60 + [180] * 30 + [165] * 15 + [180] * 15 + [tokens - 26] * 50
    positions = [*range(120), *range(60, 105), *range(90, 105), *range(60, 110)]
    return ends + [tokens] * 26, positions + list(range(26))


def arrays(rows: int, tokens: int = 256) -> tuple[Array, ...]:
    rng = np.random.default_rng(7)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, tokens, heads, SIZE)), jnp.float32)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    ends, positions = tree(tokens)
    plain = list(range(tokens))
    all_ends = [ends if row % 2 == 0 else [tokens] * tokens for row in range(rows)]
    all_positions = [positions if row % 2 == 0 else plain for row in range(rows)]
    return q, k, v, jnp.asarray(all_ends), jnp.asarray(all_positions)


def loss(function: Callable[..., Array], cap: float | None, window: int, *given: Array) -> Array:
    out = function(*given, jnp.asarray(window), scale=SIZE**-0.5, cap=cap)
    return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out


def gradient(function: Callable[..., Array], cap: float | None, window: int) -> Callable[..., Any]:
    return jax.value_and_grad(partial(loss, function, cap, window), argnums=(0, 1, 2), has_aux=True)


@pytest.mark.parametrize(("cap", "window"), [(None, 1000), (30.0, 40)])
def test_outputs_and_gradients_are_those_of_the_plain_attention(cap: float | None, window: int) -> None:
    given = arrays(2)
    ((_, wanted), wanted_of), ((_, out), out_of) = (
        jax.jit(gradient(function, cap, window))(*given) for function in (attention, INTERPRETED)
    )
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    for one, other in zip(out_of, wanted_of, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_on_a_mesh_each_device_has_its_rows_and_heads() -> None:
    given = arrays(4)
    mesh = make_mesh(2, 2, 1, jax.devices()[:8])
    (_, wanted), wanted_of = jax.jit(gradient(attention, None, 1000))(*given)
    there = jax.device_put(given, replicated(mesh))
    (_, out), out_of = jax.jit(on_mesh(mesh, gradient(INTERPRETED, None, 1000)))(*there)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    for one, other in zip(out_of, wanted_of, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_steps_on_a_mesh_are_those_with_the_plain_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batch = save_tiny_model(tmp_path / "model", head_dim=SIZE), make_batch(groups=6)
    make = partial(mesh_policy, path, token_budget=128, recompute=True)
    plain = make(1, (1, 1, 1))
    plain.step(batch, rejected_dir=tmp_path)
    asked: list[tuple[int, ...]] = []

    def serves(q: Array) -> bool:
        asked.append(q.shape)
        return q.shape[1] % splash.LANES == 0

    monkeypatch.setattr(splash, "serves", serves)
    monkeypatch.setattr(splash, "attention", INTERPRETED)
    found = make(4, (2, 2, 1))
    found.step(batch, rejected_dir=tmp_path)
    assert any(shape[1] == splash.LANES for shape in asked)
    weights = named(plain.state.weights)
    for name, weight in named(found.state.weights).items():
        np.testing.assert_allclose(weight, weights[name], atol=1e-5, rtol=0, err_msg=name)


def test_it_is_taken_on_a_tpu_for_shapes_that_the_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    q = arrays(1)[0]
    assert not splash.serves(q)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert splash.serves(q)
    assert not splash.serves(q[..., :64]) and not splash.serves(q[:, :64])
    monkeypatch.setenv(splash.VARIABLE, "plain")
    assert not splash.serves(q)
    monkeypatch.delenv(splash.VARIABLE)
    assert not on_mesh(make_mesh(1, 1, 2, jax.devices()[:2]), splash.serves)(q)


def test_the_program_with_its_gradient_is_lowered_for_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(1)
    monkeypatch.setattr(splash, "serves", lambda q: True)
    traced = jax.jit(gradient(attention, 30.0, 40)).trace(*given)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
