"""A checkpoint of the trainer in torch as one of the trainer in JAX, and back, so that a run goes on with the
other backend. Needs no torch.

    torch                                    JAX
    {name}                                   weights/{name}
    exp_avg/{name}, exp_avg_sq/{name}        moments/mu/{name}, moments/nu/{name}
    step/{name}, the same of every tensor    moments/count
    value/value_head.{name}                  head/{name}
    exp_avg/value_head.{name}, and so on     head_moments/mu/{name}, and so on

JAX stacks the tensors of all layers: `model.layers.{i}.{name}` are one array `model.layers/{name}`. The
generators of torch are not converted, because no step draws from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import DataError, boundary
from millrace.core.supported import DRAFTER
from millrace.devices.low_rank import MAGNITUDE
from millrace.trainer.files.checkpoint_manifest import (
    FILE_BYTES_MAX,
    JAX,
    NAME,
    TORCH,
    CheckpointManifest,
    describe,
    directory_name,
    file_names,
    read_manifest,
    refuse_another_format,
    refuse_damaged,
    write_manifest,
)
from millrace.trainer.files.directories import atomic_directory
from millrace_jax.files.checkpoint import read_arrays, write_checkpoint

Arrays = dict[str, NDArray[Any]]

HEAD = "value_head."  # of the critic's tensors in torch
PARTS = (("weights", "moments", ""), ("head", "head_moments", HEAD))
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
LAYER, LAYERS = "model.layers.", "model.layers/"


def convert(checkpoint: Path, directory: Path, to: str) -> Path:
    """Write `checkpoint` as `directory`/v{version:08d} for the trainer in `to`, "torch" or "jax". Returns
    the new checkpoint. It may be `checkpoint` itself, which is then replaced.

    Raises: DataError: the checkpoint is damaged, not of the other trainer, or holds what has no counterpart.
    """
    manifest = read_manifest(checkpoint)
    refuse_another_format(checkpoint, manifest, TORCH if to == "jax" else JAX)
    refuse_damaged(checkpoint, manifest, sorted(manifest.files))
    target = directory / directory_name(manifest.version)
    if to == "jax":
        files = {kind: [checkpoint / n for n in manifest.files if n.startswith(kind)] for kind in _KINDS}
        optimizer = {name: x for name, x in _read(files["optimizer"]).items() if f"/{DRAFTER}" not in name}
        arrays = of_torch(_read(files["model"]), optimizer, str(checkpoint))
        write_checkpoint(target, manifest.version, arrays)
    else:
        _write_torch(target, manifest.version, *of_jax(read_arrays(checkpoint)))
    return target


def of_torch(model: Mapping[str, Any], optimizer: Mapping[str, Any], where: str) -> Arrays:
    """The arrays of the trainer in JAX. `where`: the checkpoint, for messages.

    Raises: DataError: the trainer in JAX has no such weights, or no such optimizer.
    """
    head = {
        name.removeprefix(f"value/{HEAD}"): x for name, x in optimizer.items() if name.startswith("value/")
    }
    _refuse_without_counterpart(model, optimizer, head, where)
    arrays: Arrays = {}
    for (part, moments, prefix), values in zip(PARTS, (model, head), strict=True):
        if not values:
            continue
        arrays |= _below(part, stacked(values))
        for key, moment in MOMENTS.items():
            of_values = {
                name: optimizer.get(f"{key}/{prefix}{name}", np.zeros_like(x)) for name, x in values.items()
            }
            arrays |= _below(f"{moments}/{moment}", stacked(of_values))
        steps = {int(optimizer.get(f"step/{prefix}{name}", 0)) for name in values}
        if len(steps) > 1:
            raise DataError(f"{where}: its tensors have had {sorted(steps)} updates, and not equally many")
        arrays[f"{moments}/count"] = np.asarray(steps.pop(), np.int32)
    return arrays


def of_jax(arrays: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """The tensors of the trainer in torch: of its model, and of its optimizer and critic."""
    model, optimizer = unstacked(_above("weights", arrays)), Arrays()
    head = _above("head", arrays)
    optimizer |= {f"value/{HEAD}{name}": x for name, x in head.items()}
    for (_, moments, prefix), values in zip(PARTS, (model, head), strict=True):
        for key, moment in MOMENTS.items():
            of_values = unstacked(_above(f"{moments}/{moment}", arrays))
            optimizer |= {f"{key}/{prefix}{name}": x for name, x in of_values.items()}
        for name in values:
            optimizer[f"step/{prefix}{name}"] = np.asarray(arrays[f"{moments}/count"], np.float32)
    return model, optimizer


def stacked(tensors: Mapping[str, Any]) -> Arrays:
    """`tensors` with one array for all layers."""
    arrays, layers = Arrays(), defaultdict[str, dict[int, Any]](dict)
    for name, x in tensors.items():
        index, _, rest = name.removeprefix(LAYER).partition(".")
        if name.startswith(LAYER):
            layers[rest][int(index)] = x
        else:
            arrays[name] = x
    for rest, of_layers in layers.items():
        arrays[LAYERS + rest] = np.stack([of_layers[index] for index in sorted(of_layers)])
    return arrays


def unstacked(arrays: Mapping[str, Any]) -> Arrays:
    """The inverse of `stacked`."""
    tensors = Arrays()
    for name, x in arrays.items():
        if name.startswith(LAYERS):
            rest = name.removeprefix(LAYERS)
            tensors |= {f"{LAYER}{index}.{rest}": of_layer for index, of_layer in enumerate(x)}
        else:
            tensors[name] = x
    return tensors


def _below(part: str, arrays: Arrays) -> Arrays:
    return {f"{part}/{name}": x for name, x in arrays.items()}


def _above(part: str, arrays: Mapping[str, Any]) -> Arrays:
    return {n.removeprefix(f"{part}/"): x for n, x in arrays.items() if n.startswith(f"{part}/")}


def _refuse_without_counterpart(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], head: Mapping[str, Any], where: str
) -> None:
    layers = {int(name.split(".")[2]) for name in model if name.startswith(LAYER)}
    rests = {name.split(".", 3)[3] for name in model if name.startswith(LAYER)}
    whole = {f"{LAYER}{index}.{rest}" for index in range(len(layers)) for rest in rests}
    if any(name.endswith(MAGNITUDE) for name in model) or whole - model.keys():
        raise DataError(
            f"{where} cannot be converted: it has a DoRA magnitude, or layers that differ, and the trainer "
            "in JAX trains equal layers, and LoRA alone. Go on in torch"
        )
    keys, names = ("step", *MOMENTS), [*model, *(HEAD + name for name in head)]
    known = {f"{key}/{name}" for key in keys for name in names} | {f"value/{HEAD}{name}" for name in head}
    if unknown := sorted(optimizer.keys() - known):
        raise DataError(
            f"{where} cannot be converted: its optimizer has {unknown[:4]}, and the trainer in JAX has "
            '`optimizer.rule` "adamw" with `optimizer.states` "float32" alone. Go on in torch'
        )


_KINDS = ("model", "optimizer", "rng")


def _read(files: Sequence[Path]) -> Arrays:
    import ml_dtypes  # noqa: F401 - teaches numpy bfloat16
    from safetensors.numpy import load_file

    arrays = Arrays()
    for file in files:
        with boundary("convert", f"read {file}", DataError):
            arrays |= load_file(file)
    return arrays


def _write_torch(target: Path, version: int, model: Arrays, optimizer: Arrays) -> None:
    from safetensors.numpy import save_file

    with atomic_directory(target, marker=NAME) as path:
        for kind, tensors in zip(_KINDS, (model, optimizer, Arrays()), strict=True):
            shares = _shares(tensors)
            for name, share in zip(file_names(kind, len(shares)), shares, strict=True):
                whole = {key: np.asarray(x, order="C") for key, x in share.items()}
                save_file(whole, path / name, metadata={"format": "pt"})
        described = {file.name: describe(file) for file in sorted(path.iterdir())}
        write_manifest(path, CheckpointManifest(TORCH, version, described))


def _shares(tensors: Arrays) -> list[Arrays]:
    """Tensors for each file."""
    shares, free = [Arrays()], FILE_BYTES_MAX
    for name, x in tensors.items():
        if x.nbytes > free and shares[-1]:
            shares.append({})
            free = FILE_BYTES_MAX
        shares[-1][name] = x
        free -= x.nbytes
    return shares
