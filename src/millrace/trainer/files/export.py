"""Writes a model as a Hugging Face directory, block by block: no process holds all weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace.config.tables.training import Adapter
from millrace.core.errors import DataError
from millrace.devices.low_rank import lengths
from millrace.trainer.adapted_linear import (
    adapt,
    adapted_layers,
    base_weights,
    merged_blocks,
    trained_weights,
)
from millrace.trainer.files.checkpoint import refuse_another_model, verified
from millrace.trainer.files.companion_files import CONFIG as ADAPTER_CONFIG
from millrace.trainer.files.companion_files import PREFIX, peft_config, read_tokenizer, write_tokenizer
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.tensor_files import UnfusedTensors, fill, index, lay_out, make, open_tensors
from millrace.trainer.model import load_model, named_weights
from millrace.trainer.ranks.blocks import OwnedBlock, copy_into, owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, all_or_none

NO_ADAPTER = Adapter()


def save_model(
    model: PreTrainedModel,
    tokenizer: Mapping[str, bytes],
    directory: Path,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
) -> None:
    """Write config, weights in `dtype` and a tokenizer's files into `directory`. Each rank writes its own
    blocks. An adapter is merged into the weights."""
    blocks = merged_blocks(model) if adapted_layers(model) else [owned_blocks(named_weights(model))]
    _write(model, blocks, tokenizer, directory, dtype=dtype, ranks=ranks)


def export_checkpoint(
    checkpoint: Path, out: Path, *, model_path: str, dtype: str, adapter: Adapter = NO_ADAPTER
) -> None:
    """Write the model of a checkpoint into `out`. `model_path`: the start model of the run. `dtype`: of the
    written weights. `adapter`: of the run.

    Raises: DataError: the checkpoint is damaged, or of another model; `out` is something else.
    """
    if adapter.rank is not None:
        adapted = _adapted(checkpoint, model_path=model_path, dtype=dtype, adapter=adapter)
        with atomic_directory(out, marker="config.json") as directory:
            save_model(adapted, read_tokenizer(model_path), directory, getattr(torch, dtype))
        return
    _, files = verified(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    saved, tokenizer = open_tensors(files["model"]), read_tokenizer(model_path)
    refuse_another_model(named_weights(model), saved, checkpoint)
    with atomic_directory(out, marker="config.json") as directory:
        _write(model, [owned_blocks(saved)], tokenizer, directory, dtype=getattr(torch, dtype))


def export_adapter(checkpoint: Path, out: Path, *, model_path: str, dtype: str, adapter: Adapter) -> None:
    """Write the adapter alone, for peft. Raises: as `export_checkpoint`."""
    model = _adapted(checkpoint, model_path=model_path, dtype=dtype, adapter=adapter)
    with atomic_directory(out, marker=ADAPTER_CONFIG) as directory:
        save_file(peft_tensors(model, getattr(torch, dtype)), directory / "adapter_model.safetensors")
        config = peft_config(adapted_layers(model), adapter, model_path)
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _adapted(checkpoint: Path, *, model_path: str, dtype: str, adapter: Adapter) -> PreTrainedModel:
    _, files = verified(checkpoint)
    saved = open_tensors(files["model"])
    model = load_model(model_path, torch.device("cpu"))
    adapt(model, adapter, published=getattr(torch, dtype), seed=0)
    weights = trained_weights(model)
    refuse_another_model(weights, saved, checkpoint)
    copy_into(owned_blocks(weights, copies=True), saved)
    return model


def _write(
    model: PreTrainedModel,
    blocks: Iterable[Collection[OwnedBlock]],
    tokenizer: Mapping[str, bytes],
    directory: Path,
    *,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
) -> None:
    weights = base_weights(model)
    files = lay_out("model", weights, dtype, _unfused(model, weights))
    with all_or_none(ranks):
        if ranks.rank == 0:
            _describe(model, dtype, directory)
            write_tokenizer(tokenizer, directory)
            if len(files) > 1:
                (directory / "model.safetensors.index.json").write_bytes(index(files))
            make(directory, files)
    for of_weights in blocks:
        fill(directory, files, of_weights)


def _describe(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> None:
    """Write the files that `transformers` needs beside the weights."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = dtype, [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def _unfused(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, UnfusedTensors]:
    """The names in files of the weights that transformers fuses: in files each expert has its own matrices.

    transformers takes apart tensors of row numbers. The numbers show the place of each matrix in the weight.

    Raises: DataError: the rows of a matrix are not adjacent rows of one weight.
    """
    if all(weight.ndim < 3 for weight in weights.values()):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    first, rows = {}, {}
    num_rows = 0
    for name, weight in weights.items():
        *outer, _ = weight.shape
        rows[name] = torch.arange(num_rows, num_rows + math.prod(outer)).reshape(*outer, 1)
        first[num_rows], num_rows = name, num_rows + math.prod(outer)
    unfused: dict[str, UnfusedTensors] = {}
    apart = revert_weight_conversion(model, rows)
    for matrix, numbers in sorted(apart.items(), key=lambda item: int(item[1].flatten()[0])):
        begin = int(numbers.flatten()[0])
        name = first[max(row for row in first if row <= begin)]
        if not torch.equal(numbers.flatten(), torch.arange(begin, begin + numbers.numel())):
            raise DataError(
                f"`{matrix}` is not one block of `{name}`: {model.config.model_type} models are not exported"
            )
        unfused.setdefault(name, []).append((matrix, (*numbers.shape[:-1], weights[name].shape[-1])))
    return unfused


def peft_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adapter's tensors in `dtype`, under peft's names. DoRA's magnitude is in float32, because rounding
    it would change every row."""
    tensors = {}
    for name, layer in adapted_layers(model).items():
        for matrix in ("lora_A", "lora_B"):
            tensors[f"{PREFIX}{name}.{matrix}.weight"] = getattr(layer, matrix).detach().to("cpu", dtype)
        if layer.lora_magnitude is not None:
            magnitude = lengths(layer.weight, layer.lora_magnitude).detach()
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude.to("cpu")
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
