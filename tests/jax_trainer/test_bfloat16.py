"""Products in bfloat16 with masters in float32, as on accelerators. The CPU computes them too, slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_jax_adapters import adapted_policy, tensors_of, torch_model
from test_presets import few_shapes, make_policy  # noqa: F401 - the fixture is for every test
from trainer_doubles import MemoryWriter, make_batch, make_trainer

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.types import Endpoint
from millrace_jax.policy import JaxPolicy
from millrace_jax.publisher import JaxPublisher
from millrace_jax.weights import LAYERS, shapes, slices

ROUNDING = 2.0**-8  # of bfloat16: half of the distance to the next number, relative
IN_JAX: dict[str, Any] = {"dtype": jnp.bfloat16, "published": jnp.bfloat16, "max_tokens": 20}
IN_TORCH: dict[str, Any] = {"dtype": torch.bfloat16, "published": torch.bfloat16, "max_tokens": 20}


def assert_close(found: dict[str, Any], due: dict[str, Any], roundings: float) -> None:
    """The Euclidean distance of each tensor, relative to its length."""
    assert found.keys() == due.keys()
    for name, x in due.items():
        assert np.linalg.norm(found[name] - x) < roundings * ROUNDING * np.linalg.norm(x), name


def gradient_of(policy: JaxPolicy) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in slices(policy.gradient[0], policy.shape)}


def test_gradients_are_those_of_torch_within_bfloat16(tmp_path: Path) -> None:
    """Seen: each is 2 to 7 roundings from the gradient in float32, and 3 to 7 from the other."""
    algorithm, batch = build(PolicyGradient()), make_batch()
    policy = make_policy(tmp_path, algorithm, **IN_JAX)
    exact = make_policy(tmp_path, algorithm, **IN_JAX | {"dtype": jnp.float32})
    trainer = make_trainer(algorithm, **IN_TORCH)
    losses = [each.accumulate(batch).loss for each in (policy, exact, trainer)]
    assert losses == pytest.approx([losses[1]] * 3, rel=2 * ROUNDING)
    found, right = gradient_of(policy), gradient_of(exact)
    assert all(x.dtype == np.float32 for x in found.values())
    due = {name: x.grad.numpy() for name, x in trainer.model.named_parameters()}
    assert_close(found, due, 12)
    assert_close(found, right, 12)
    assert all(np.abs(found[name] - x).max() > 1e-6 for name, x in right.items())  # it was computed in it


def test_gradients_of_an_adapter_are_those_of_torch_within_bfloat16(tmp_path: Path) -> None:
    model = torch_model("qwen2", published=torch.bfloat16)
    trainer = make_trainer(model=model, **IN_TORCH)
    policy = adapted_policy(tmp_path, "qwen2", **IN_JAX)
    for each in (trainer, policy):
        each.accumulate(make_batch())
    due = {name: x.grad.numpy() for name, x in model.named_parameters() if x.requires_grad}
    found = tensors_of(policy.gradient[0], policy)
    ups = [name for name in due if name.endswith("lora_B")]
    assert_close({name: found[name] for name in ups}, {name: due[name] for name in ups}, 12)
    assert not any(np.any(found[name]) for name in set(due) - set(ups))  # B is 0: A has no gradient yet
    assert {x.dtype for x in jax.tree.leaves(policy.base)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(policy.state.weights)} == {jnp.dtype(jnp.float32)}


def test_masters_keep_updates_that_bfloat16_would_round_away(tmp_path: Path) -> None:
    optimizer = Optimizer(lr=1e-6, grad_clip=None)
    policy = make_policy(tmp_path, build(PolicyGradient()), **IN_JAX | {"optimizer": optimizer})
    name = "mlp.up_proj.weight"
    before = np.array(policy.state.weights[LAYERS][name])
    for version in range(2):
        policy.step(make_batch(version), rejected_dir=tmp_path)
    after = np.asarray(policy.state.weights[LAYERS][name])
    moved = np.abs(after - before)
    assert after.dtype == np.float32 and 0.5e-6 < np.median(moved) < 2.5e-6
    rounded_away = before.astype(jnp.bfloat16) == after.astype(jnp.bfloat16)
    assert (rounded_away & (moved > 0)).mean() > 0.9


def test_what_is_published_is_the_masters_rounded(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, build(PolicyGradient()), **IN_JAX)
    policy.step(make_batch(), rejected_dir=tmp_path)
    endpoint = Endpoint("memory", "here", 2, 1 << 20)
    writer, publisher = MemoryWriter(endpoint), JaxPublisher(shapes(policy.shape), jnp.bfloat16)
    publisher.begin(lambda: writer, endpoint, 1, policy.state.weights)
    publisher.result()
    (_, written), *_ = writer.written
    for name, x in slices(policy.state.weights, policy.shape):
        due = torch.from_numpy(np.array(x)).bfloat16().view(-1).view(torch.uint8).numpy().tobytes()
        assert written[name] == due, name
