"""Hugging Face's tensors as a tree with stacked layers, and back.

A tree is a dict of arrays by name: those outside of layers by their names in files, and under LAYERS a dict
of the tensors of all layers, stacked, by their names in a layer. So one `lax.scan` runs over the layers.
Matrices keep the orientation of files, (outputs, inputs): a published tensor is a slice, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401 - teaches numpy bfloat16
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray
from safetensors import safe_open

from millrace.core.errors import DataError, boundary
from millrace.core.supported import is_no_parameter
from millrace.placement.model_directory import weight_files
from millrace.trainer.ranks.mesh import Ranks
from millrace_jax.decoder import Decoder
from millrace_jax.devices.mesh import refuse_undivided, replicated, sharding

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYERS = "model.layers"

Tree = dict[str, Any]
"""Arrays by name, and under LAYERS a dict of arrays."""


def shapes(architecture: Decoder) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in files, in state-dict order."""
    embedding = architecture.vocab, architecture.hidden_size
    layers = {
        f"{LAYERS}.{index}.{name}": shape
        for index in range(architecture.num_layers)
        for name, shape in architecture.layer_shapes.items()
    }
    head = {} if architecture.tied else {HEAD: embedding}
    return {EMBEDDING: embedding, **layers, NORM: (architecture.hidden_size,), **head}


def slices(tree: Tree, architecture: Decoder) -> Iterator[tuple[str, Any]]:
    """Each tensor by its name in files, in state-dict order."""
    return named_slices(tree, shapes(architecture))


def named_slices(tree: Tree, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The tensors with these names in files."""
    for name in names:
        layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
        yield name, tree[LAYERS][rest][int(layer)] if name.startswith(f"{LAYERS}.") else tree[name]


def shardings(architecture: Decoder, mesh: Mesh) -> Tree:
    """A `NamedSharding` for each array of a tree. Raises: ConfigError: the mesh does not divide the model."""
    refuse_undivided(architecture, *(mesh.shape[axis] for axis in ("fsdp", "tensor", "sequence")))
    outside = [name for name in shapes(architecture) if not name.startswith(f"{LAYERS}.")]
    return {
        **{name: sharding(mesh, name, stacked=False) for name in outside},
        LAYERS: {name: sharding(mesh, name, stacked=True) for name in architecture.layer_shapes},
    }


def read_weights(path: Path, architecture: Decoder, mesh: Mesh) -> Tree:
    """The weights in the directory `path`, in float32. A process reads what its devices hold, one stacked
    tensor at a time.

    Raises: ConfigError: the mesh does not divide the model. DataError: the files cannot be read; or a tensor
    is missing, unknown, of another shape or not finite."""
    with ExitStack() as stack, boundary("trainer", f"`model.path`: read {path}", DataError):
        opened = [stack.enter_context(safe_open(file, "numpy")) for file in weight_files(path)]
        tensors = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
        _refuse_unfit(path, tensors, architecture)
        strange: set[str] = set()

        def read(name: str, where: NamedSharding) -> Any:
            return _read(tensors, [name], where, strange)

        def read_layers(name: str, where: NamedSharding) -> Any:
            layers = [f"{LAYERS}.{index}.{name}" for index in range(architecture.num_layers)]
            return _read(tensors, layers, where, strange, stacked=True)

        places = shardings(architecture, mesh)
        of_layers = {name: read_layers(name, where) for name, where in places.pop(LAYERS).items()}
        tree = {name: read(name, where) for name, where in places.items()}
    _refuse(path, {"not finite": strange})
    return {**tree, LAYERS: of_layers}


def _read(
    tensors: dict[str, Any],
    names: list[str],
    where: NamedSharding,
    strange: set[str],
    *,
    stacked: bool = False,
) -> Any:
    """The tensors `names`, stacked, or the only one. `strange` gets the names of those not finite."""
    whole = tuple(tensors[names[0]].get_shape())

    @cache  # several devices may have the same part
    def read(bounds: tuple[tuple[int, int], ...]) -> NDArray[np.float32]:
        part = np.empty((len(names), *(stop - start for start, stop in bounds)), np.float32)
        for into, name in zip(part, names, strict=True):
            into[:] = tensors[name][tuple(slice(*each) for each in bounds)]
            if not np.isfinite(into).all():
                strange.add(name)
        return part if stacked else part[0]

    def of_device(index: tuple[slice, ...]) -> NDArray[np.float32]:
        inside = zip(index[stacked:], whole, strict=True)
        return read(tuple(each.indices(size)[:2] for each, size in inside))

    shape = (len(names), *whole) if stacked else whole
    return jax.make_array_from_callback(shape, where, of_device)


def on_host(tree: Tree, mesh: Mesh, ranks: Ranks) -> Tree:
    """Arrays that numpy can read. Those of several processes are gathered in the first one, layer by layer.
    All processes call this, and the others get an empty tree."""
    if ranks.world == 1:
        return tree
    whole = partial(jax.jit, out_shardings=replicated(mesh))
    gather, gather_layer = whole(lambda x: x), whole(lambda x, index: x[index])

    def layers(x: Any) -> Any:
        read = [gather_layer(x, index) for index in range(len(x))]
        return np.stack(list(map(np.asarray, read))) if ranks.rank == 0 else None

    of_layers = {name: layers(x) for name, x in tree[LAYERS].items()}
    outside = {name: gather(x) for name, x in tree.items() if name != LAYERS}
    return {**jax.tree.map(np.asarray, outside), LAYERS: of_layers} if ranks.rank == 0 else {}


def _refuse_unfit(path: Path, tensors: dict[str, Any], architecture: Decoder) -> None:
    expected = shapes(architecture)
    unknown = {name for name in set(tensors) - set(expected) if not is_no_parameter(name)}
    if architecture.tied:
        unknown.discard(HEAD)
    common = set(tensors) & set(expected)
    other = {name for name in common if tuple(tensors[name].get_shape()) != expected[name]}
    _refuse(path, {"missing": set(expected) - common, "left over": unknown, "of another shape": other})


def _refuse(path: Path, problems: dict[str, set[str]]) -> None:
    """Raises: DataError: there is a problem."""
    if any(problems.values()):
        named = (f"{fault}: {', '.join(sorted(names)[:4])}" for fault, names in problems.items() if names)
        raise DataError(
            f"`model.path` ({path}): the weights are not whole: tensors {'; '.join(named)}. "
            "Fetch the model again, or save it anew with `save_pretrained`"
        )


def write_tensors(path: Path, tensors: Iterable[tuple[str, Any]], dtype: Any) -> None:
    """One safetensors file, as Hugging Face reads it. `tensors`: by name, arrays that numpy can read."""
    from safetensors.numpy import save_file

    rounded = {name: np.ascontiguousarray(np.asarray(x).astype(dtype)) for name, x in tensors}
    save_file(rounded, path, metadata={"format": "pt"})
