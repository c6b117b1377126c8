"""The policy of a run, from the model that it begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from millrace.algorithms import of_run
from millrace.config.schema import Config
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.files.companion_files import refuse_other_tokens
from millrace_jax.adapted_matmul import MergeRule
from millrace_jax.adapter_tree import begin_adapter
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.policy import FrozenPolicy, JaxPolicy
from millrace_jax.weights import Tree, read_weights


def load_policy(config: Config) -> JaxPolicy:
    """The policy before its first step, on all devices that JAX sees.

    Raises: DataError: a directory has no model, or one that the trainer cannot compute; the teacher has other
    tokens. ConfigError: the mesh does not divide a model, or the model can have no such adapter."""
    path, ranks = Path(config.model.path), config.trainer
    algorithm, shape, published = of_run(config), read_architecture(path), jnp.dtype(config.model.dtype)
    mesh = make_mesh(ranks.shard, ranks.tensor, ranks.sequence, jax.devices())
    weights, base = read_weights(path, shape, mesh), None
    if config.adapter.scale is not None:
        base = _rounded(weights, published)
        weights = begin_adapter(shape, config.adapter, config.seed, mesh)
        shape = replace(shape, merging=MergeRule(config.adapter.scale, published))
    reference = None
    if algorithm.needs_reference and not config.reference_apart:
        reference = _frozen(config, base, mesh)
    return JaxPolicy(
        shape,
        weights,
        algorithm,
        _settings(config),
        base=base,
        reference=reference,
        recompute=config.model.recompute,
        mesh=mesh,
    )


def _settings(config: Config) -> StepSettings:
    published = jnp.dtype(config.model.dtype)
    return StepSettings(
        optimizer=config.optimizer,
        token_budget=config.batch.token_budget,
        max_tokens=config.completion_tokens_max,
        temperature=config.sampling.temperature,
        dtype=jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else published,
        published=published,
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
    )


def _rounded(weights: Tree, published: Any) -> Tree:
    """The frozen weights beside an adapter, as replicas have them."""
    return jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(published), tree), donate_argnums=0)(weights)


def _frozen(config: Config, base: Tree | None, mesh: Mesh) -> FrozenPolicy:
    """The teacher, or else the reference: the model without its adapter."""
    path, published = Path(config.model.path), jnp.dtype(config.model.dtype)
    if (teacher := config.teacher) is not None:
        refuse_other_tokens(teacher, config.model.path)
        path, published, base = Path(teacher), jnp.dtype(jnp.float32), None
    shape = read_architecture(path)
    return FrozenPolicy(read_weights(path, shape, mesh) if base is None else base, shape, published)
