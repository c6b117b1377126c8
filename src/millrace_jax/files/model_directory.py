"""Hugging Face directories of the trainer in JAX. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from millrace.config.tables.training import Adapter
from millrace.core.errors import DataError
from millrace.trainer.files.companion_files import (
    CONFIG,
    PREFIX,
    peft_config,
    read_tokenizer,
    write_tokenizer,
)
from millrace.trainer.files.directories import atomic_directory
from millrace_jax.adapted_matmul import MergeRule
from millrace_jax.adapter_tree import adapter_dims, whole_model
from millrace_jax.decoder import Decoder, read_architecture
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.files.checkpoint import read_arrays, verified
from millrace_jax.weights import LAYERS, Tree, named_slices, read_weights, write_tensors

NO_ADAPTER = Adapter()


def save_model(
    tensors: Iterable[tuple[str, Any]],
    tokenizer: Mapping[str, bytes],
    directory: Path,
    *,
    model_path: Path,
    dtype: str,
) -> None:
    """Write config, `tensors` in `dtype` and a tokenizer's files into `directory`. `tensors`: by their names
    in files. `model_path`: the start model, whose config.json is used."""
    config = json.loads((model_path / "config.json").read_bytes())
    config.pop("torch_dtype", None)  # of older files, for the same
    (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    write_tokenizer(tokenizer, directory)
    write_tensors(directory / "model.safetensors", tensors, dtype)


def export_checkpoint(
    checkpoint: Path, out: Path, *, model_path: str, dtype: str, adapter: Adapter = NO_ADAPTER
) -> None:
    """Write the model of a checkpoint into `out`. `model_path`: the start model of the run. `adapter`: of the
    run, which is merged.

    Raises: DataError: the checkpoint is damaged, or of another model; `out` is something else.
    """
    verified(checkpoint)
    source = Path(model_path)
    shape = read_architecture(source)
    weights, base = _weights(checkpoint), None
    if adapter.scale is not None:
        _refuse_other_adapter(weights, shape, adapter, checkpoint)
        base = read_weights(source, shape, make_mesh(1, 1, 1, jax.local_devices(backend="cpu")[:1]))
        shape = replace(shape, merging=MergeRule(adapter.scale, jnp.dtype(dtype)))
    tensors = whole_model(base, weights, shape)
    with atomic_directory(out, marker="config.json") as directory:
        save_model(tensors, read_tokenizer(source), directory, model_path=source, dtype=dtype)


def export_adapter(checkpoint: Path, out: Path, *, model_path: str, dtype: str, adapter: Adapter) -> None:
    """Write the adapter of a checkpoint alone, for peft. Raises: as `export_checkpoint`."""
    verified(checkpoint)
    shape = read_architecture(Path(model_path))
    weights = _weights(checkpoint)
    _refuse_other_adapter(weights, shape, adapter, checkpoint)
    dims = adapter_dims(shape, adapter)
    tensors = ((f"{PREFIX}{name}.weight", x) for name, x in named_slices(weights, dims))
    config = peft_config({name.rpartition(".")[0] for name in dims}, adapter, model_path)
    with atomic_directory(out, marker=CONFIG) as directory:
        write_tensors(directory / "adapter_model.safetensors", tensors, dtype)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weights(checkpoint: Path) -> Tree:
    """The trained weights of a verified checkpoint, on the host."""
    arrays = {name.removeprefix("weights/"): x for name, x in read_arrays(checkpoint, "weights/").items()}
    layered = {name.removeprefix(f"{LAYERS}/"): x for name, x in arrays.items() if name.startswith(LAYERS)}
    return {name: x for name, x in arrays.items() if not name.startswith(LAYERS)} | {LAYERS: layered}


def _refuse_other_adapter(weights: Tree, shape: Decoder, adapter: Adapter, checkpoint: Path) -> None:
    due = {name.split(".", 3)[3]: (shape.num_layers, *x) for name, x in adapter_dims(shape, adapter).items()}
    if {name: x.shape for name, x in weights[LAYERS].items()} != due:
        raise DataError(f"{checkpoint} holds another adapter than `[adapter]` of its run says")
