"""Weights that changed in memory since they were published are not trained on, and not saved."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_bfloat16 import MemoryWriter
from test_presets import make_policy
from trainer_doubles import make_batch

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.errors import DigestMismatchError
from millrace.core.types import Endpoint
from millrace.trainer.publish import rechecked
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.policy import JaxPolicy
from millrace_jax.publisher import JaxPublisher
from millrace_jax.role import JaxTrainer
from millrace_jax.weights import shapes

ENDPOINT = Endpoint("memory", "here", 2, 1 << 20)


def published(policy: JaxPolicy, dtype: Any) -> JaxPublisher:
    """The policy's publisher, which has published its weights."""
    publisher = JaxPublisher(shapes(policy.shape), dtype, current=lambda: policy.state.weights)
    policy.before_update = publisher.before_update
    publish(policy, publisher)
    return publisher


def publish(policy: JaxPolicy, publisher: JaxPublisher) -> None:
    writer = MemoryWriter(ENDPOINT)
    publisher.begin(lambda: writer, ENDPOINT, policy.version, policy.state.weights)
    publisher.result()


def damage(policy: JaxPolicy) -> None:
    """Other bits in the first number of a tensor, of its last block."""
    tensor = jax.tree.leaves(policy.state.weights)[0]
    block = tensor.addressable_shards[-1].data
    ctypes.memset(block.unsafe_buffer_pointer(), 0x41, 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [1, 2])
def test_weights_that_changed_in_memory_are_not_trained_on(
    devices: int, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rechecked, "RECHECK_SHARE", 1e9)  # before every update
    mesh = make_mesh(devices, 1, 1, jax.devices()[:devices])
    policy = make_policy(tmp_path, build(PolicyGradient()), mesh=mesh)
    publisher = published(policy, dtype)
    policy.step(make_batch(0), rejected_dir=tmp_path)
    publish(policy, publisher)
    publisher.refuse_changed(policy.version)
    damage(policy)
    publisher.refuse_changed(policy.version + 1)  # of which nothing was published
    for refused in (
        lambda: publisher.refuse_changed(policy.version),
        lambda: policy.step(make_batch(1), rejected_dir=tmp_path),
    ):
        with pytest.raises(DigestMismatchError, match="weights of version 1 changed in memory"):
            refused()
    assert policy.version == 1


def test_weights_that_changed_in_memory_are_not_saved(tmp_path: Path) -> None:
    class Saver:
        def begin(self, *_: object) -> None:
            pytest.fail("it was saved")

    policy = make_policy(tmp_path, build(PolicyGradient()))
    trainer = object.__new__(JaxTrainer)
    trainer._trainer, trainer._saver, trainer._ranks = policy, Saver(), rechecked.ALONE
    trainer._publisher = published(policy, jnp.float32)
    damage(policy)
    with pytest.raises(DigestMismatchError):
        trainer._checkpoint(str(tmp_path / "checkpoint"))
    assert trainer._trainer is None
