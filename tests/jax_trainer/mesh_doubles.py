"""Policies on meshes of simulated devices, for the tests of meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from trainer_doubles import make_batch

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.types import Batch
from millrace.trainer.batch.batch_step import StepSettings
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.policy import FrozenPolicy, JaxPolicy
from millrace_jax.weights import Tree, read_weights

Axes = tuple[int, int, int]
STEPS = 2  # of the test with several processes


def mesh_policy(
    model: Path,
    devices: int,
    axes: Axes,
    *,
    algorithm: Any = None,
    reference: Path | None = None,
    recompute: bool = False,
    **changes: Any,
) -> JaxPolicy:
    """`axes`: shard, tensor and sequence."""
    settings: dict[str, Any] = {
        "optimizer": Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1),
        "token_budget": 64,
        "max_tokens": 20,
        "temperature": 0.8,
        "dtype": jnp.float32,
        "published": jnp.float32,
    }
    mesh, shape = make_mesh(*axes, jax.devices()[:devices]), read_architecture(model)
    return JaxPolicy(
        shape,
        read_weights(model, shape, mesh),
        algorithm or build(PolicyGradient()),
        StepSettings(**settings | changes),
        reference=None
        if reference is None
        else FrozenPolicy(read_weights(reference, shape, mesh), shape, jnp.float32),
        recompute=recompute,
        mesh=mesh,
    )


def uneven_batch(version: int, *, groups: int = 5) -> Batch:
    """The last group has sequences of one token alone, so rows have very different numbers of them."""
    batch = make_batch(version, groups=groups)
    last = batch.groups[-1]
    short = [replace(each, columns=each.columns[:1], mask=[True]) for each in last.sequences]
    return Batch(version, [*batch.groups[:-1], replace(last, sequences=short)])


def named(weights: Tree) -> dict[str, NDArray[np.float32]]:
    """The arrays of a tree by path, whole."""
    leaves, _ = jax.tree.flatten_with_path(weights)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
