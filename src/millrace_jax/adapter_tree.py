"""An adapter as a tree: its tensors of all layers, stacked, by their names in a layer. See `weights`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from millrace.config.tables.training import Adapter
from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.devices.low_rank import BASE, DOWN, UP, adapted, first_down
from millrace_jax.adapted_matmul import MergeRule
from millrace_jax.decoder import Decoder
from millrace_jax.devices.mesh import sharding
from millrace_jax.weights import LAYERS, Tree, named_slices, shapes, slices

Dims = tuple[int, ...]


def adapter_dims(shape: Decoder, config: Adapter) -> dict[str, Dims]:
    """The shape of each of the adapter's tensors in files, in state-dict order.

    Raises: ConfigError: see `Adapter.layers`."""
    matrices = {name.removesuffix(".weight"): dims for name, dims in shapes(shape).items() if len(dims) > 1}
    dims, rank = dict[str, Dims](), config.rank or 0
    for name in config.layers(matrices):
        outputs, inputs = matrices[name]
        dims |= {f"{name}.{DOWN}": (rank, inputs), f"{name}.{UP}": (outputs, rank)}
    return dims


def begin_adapter(shape: Decoder, config: Adapter, seed: int, mesh: Mesh) -> Tree:
    """The adapter of version 0: A of `low_rank.first_down`, and B is 0. So version 0 is the model itself."""
    tensors = dict[str, list[NDArray[np.float32]]]()
    for name, dims in adapter_dims(shape, config).items():
        layer, _, kind = name.rpartition(".")
        drawn = first_down(layer, dims, seed) if kind == DOWN else np.zeros(dims, np.float32)
        tensors.setdefault(name.removeprefix(f"{LAYERS}.").partition(".")[2], []).append(drawn)
    stacked = {name: np.stack(of_layers) for name, of_layers in tensors.items()}
    return jax.device_put({LAYERS: stacked}, adapter_shardings(stacked, mesh))


def adapter_shardings(names: Iterable[str], mesh: Mesh) -> Tree:
    return {LAYERS: {name: sharding(mesh, name, stacked=True) for name in names}}


def beside(base: Tree | None, weights: Tree) -> Tree:
    """The tree of a forward pass: trained `weights`, and the frozen weights that they are beside."""
    return weights if base is None else {**base, LAYERS: {**base[LAYERS], **weights[LAYERS]}}


def frozen_weights(base: Tree | None, adapter: Tree, dtype: Any) -> Tree | None:
    """`base` in `dtype`, but for matrices that have an adapter: these are merged as published."""
    if base is None:
        return None
    cast = jax.tree.map(lambda x: x.astype(dtype), base)
    ends = f".{DOWN}"
    adapted_names = [f"{name.removesuffix(ends)}.weight" for name in adapter[LAYERS] if name.endswith(ends)]
    return {**cast, LAYERS: {**cast[LAYERS], **{name: base[LAYERS][name] for name in adapted_names}}}


def base_digits(base: Tree, shape: Decoder, dtype: str) -> NDArray[np.float32]:
    """(32,) The tensor `low_rank.BASE` of a version."""

    def as_buffer(name: str, x: Any) -> NamedBuffer:
        array = np.ascontiguousarray(np.asarray(x).astype(dtype))
        return NamedBuffer(name, dtype, array.shape, array.view(np.uint8).reshape(-1))

    digest = digest_buffers(as_buffer(*named) for named in named_slices(base, sorted(shapes(shape))))
    return np.array([int(digit, 16) for digit in digest], np.float32)


def whole_model(base: Tree | None, weights: Tree, shape: Decoder) -> Iterator[tuple[str, Any]]:
    """Each tensor of the model by its name in files. With `base`, `weights` are an adapter, which is merged:
    the tensors are those of replicas, up to float32's rounding of B A."""
    if base is None:
        return slices(weights, shape)
    assert shape.merging is not None
    return _merged(base, weights[LAYERS], shape, shape.merging)


def _merged(
    base: Tree, layers: Mapping[str, Any], shape: Decoder, merging: MergeRule
) -> Iterator[tuple[str, Any]]:
    for name, weight in slices(base, shape):
        layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
        kinds = [rest.removesuffix("weight") + kind for kind in (DOWN, UP)]
        if rest.endswith(".weight") and kinds[0] in layers:
            down, up = (_rounded(layers[kind][int(layer)], merging.published) for kind in kinds)
            weight = adapted(_rounded(weight, merging.published), down, up, None, scale=merging.scale)
        yield name, weight


def _rounded(x: Any, published: Any) -> NDArray[np.float32]:
    return np.asarray(x).astype(published).astype(np.float32)


def version_dims(shape: Decoder, config: Adapter) -> dict[str, Dims]:
    """The tensors of a published version, in their order."""
    return {**adapter_dims(shape, config), BASE: (32,)}
