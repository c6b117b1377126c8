"""A model whose weights are divided among ranks: no process ever holds all weights.

`Ranks.weights_mesh` divides along two dimensions. "weights": each rank has a block of every tensor, and a
layer gathers its tensors while it computes (FSDP2). Gradients are summed, because the weight of a token is
computed for the whole batch. "tensor": each rank computes with its block of every matrix, by transformers'
plan for the family. With a mixture of experts each rank has whole experts, a share of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from millrace.core.errors import DataError
from millrace.trainer.ranks.blocks import blocks_on_host
from millrace.trainer.ranks.gathering import gathering_modules
from millrace.trainer.ranks.mesh import Ranks
from millrace.trainer.ranks.rank_exchange import joined, same, total

# Styles of transformers' plans.
COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
JOINED, SPLIT = (
    "colwise_gather_output",
    "rowwise_split_input",
)  # fused matrices, whose outputs are whole on every rank
EXPERTS, SINKS = "moe_tp_experts", "sinks"
OF_EXPERTS = {EXPERTS, "packed_colwise"}  # styles of one expert's matrices, which `divide` leaves whole
VOCABULARY = "embedding_rowwise"  # `divide` divides the vocabulary whether a plan says so or not
PLANS = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
        "layers.*.self_attn.o_proj": ROWS,
        "layers.*.self_attn": SINKS,
        "layers.*.mlp.experts": EXPERTS,
    }
}
"""Plans of ours for families that have none in transformers."""

Forward = Callable[..., tuple[torch.Tensor, ...]]
Insert = Callable[[PreTrainedModel], None]


def load_divided(
    path: str,
    config: Any,
    ranks: Ranks,
    forward: Forward,
    insert: Insert | None,
    computing: torch.dtype,
    **options: Any,
) -> Any:
    """The result of `from_pretrained`. Only this rank's block of every tensor is read from the files.
    `insert` gives the model more layers, before it is divided. An adapter is computed in float32, so a model
    with one is gathered in float32.

    Raises: DataError: the model cannot be divided so.
    """
    _refuse(config, ranks)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def divide_empty(model: PreTrainedModel, *unused: Any) -> PreTrainedModel:
        if insert is not None:
            insert(model)
        return divide(model, ranks, forward, computing if insert is None else torch.float32)

    names = {"maybe_distribute_model": staticmethod(divide_empty), "__module__": kind.__module__}
    dividing: Any = type(kind.__name__, (kind,), names)
    undivided = DistributedConfig(tp_size=1, fsdp_size=1, pp_size=1)
    with blocks_on_host() if ranks.offload else nullcontext():
        loaded = dividing.from_pretrained(path, distributed_config=undivided, **options)
    del loaded[0].config.distributed_config  # transformers would save it
    return loaded


def _refuse(config: Any, ranks: Ranks) -> None:
    apart = ranks.tensor * ranks.sequence
    for key in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, key) % apart:
            raise DataError(
                f"`trainer.tensor` ({ranks.tensor}) times `trainer.sequence` ({ranks.sequence}) must divide "
                f"the model's `{key}` ({getattr(config, key)}).\n  Use `trainer.shard` for the other ranks"
            )
    styles = set(_plan(config).values())
    strange = styles - {COLUMNS, ROWS, PARTIAL, JOINED, SPLIT, SINKS, VOCABULARY} - OF_EXPERTS
    if ranks.tensor > 1 and (strange or not styles):
        raise DataError(
            f"`trainer.tensor` ({ranks.tensor}): {config.model_type} models are not divided in that way "
            f"({', '.join(sorted(strange)) or 'they have no plan'}).\n  Use `trainer.shard`"
        )
    for style, key in ((JOINED, "intermediate_size"), (EXPERTS, "num_experts")):
        if style in styles and getattr(config, key) % ranks.tensor:
            raise DataError(
                f"`trainer.tensor` ({ranks.tensor}) must divide the model's `{key}` "
                f"({getattr(config, key)}).\n  Use `trainer.shard` for the other ranks"
            )


def _plan(config: Any) -> dict[str, str]:
    return PLANS.get(config.model_type) or config.base_model_tp_plan or {}


def divide(
    model: PreTrainedModel, ranks: Ranks, forward: Forward, computing: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Divide `model`, which has no memory yet (device meta) or the same weights on every rank. `forward`, a
    function of the model, becomes its method `pair_logprobs`. Only this method reads weights. `computing`: of
    the matmuls."""
    mesh = ranks.weights_mesh
    assert mesh is not None
    model.tie_weights()
    if (group := ranks.group("tensor")) is not None:
        _divide_matrices(model, mesh["tensor"], group)
    if mesh["weights"].size() > 1 or ranks.offload:
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        where = pinned if ranks.offload else OffloadPolicy()
        for module, policy in gathering_modules(model, computing):
            fully_shard(module, mesh=mesh["weights"], offload_policy=where, mp_policy=policy)
        if hasattr(model.get_output_embeddings(), "target_logprobs"):
            register_fsdp_forward_method(model.get_output_embeddings(), "target_logprobs")
            model.get_input_embeddings().set_unshard_in_backward(False)  # its gradient needs no weight
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    model.ranks, model.pair_logprobs = ranks, partial(forward, model)
    register_fsdp_forward_method(model, "pair_logprobs")
    return model


def _divide_matrices(model: PreTrainedModel, mesh: Any, group: ProcessGroup) -> None:
    plan = {f"{model.base_model_prefix}.{name}": style for name, style in _plan(model.config).items()}
    placed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay one
    vocabulary = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        style = COLUMNS if module in vocabulary else plan.get(re.sub(r"\d+", "*", name), "")
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight not in placed:
                block = distribute_tensor(weight, mesh, [_placement(style, key)], src_data_rank=None)
                placed[weight] = torch.nn.Parameter(block)
            module.register_parameter(key, placed[weight])
        if module is vocabulary[0]:
            module.forward = _looked_up(module, mesh, group)
        elif style == EXPERTS:
            module.forward = _chosen(module, mesh, group)
        elif module is not vocabulary[1] and module._parameters and style != SINKS:
            module.forward = _multiplied(module, style, group)


def _placement(style: str, key: str) -> Placement:
    if style in (COLUMNS, JOINED, EXPERTS, SINKS):
        return Shard(0)
    return Shard(1) if style in (ROWS, SPLIT) and key == "weight" else Replicate()


def _multiplied(module: torch.nn.Module, style: str, group: ProcessGroup) -> Callable[..., torch.Tensor]:
    """The module's `forward` with this rank's block of its weights."""
    undivided = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        parameters: dict[str, Any] = dict(module._parameters)
        blocks = {key: weight.to_local() for key, weight in parameters.items() if weight is not None}
        if style == PARTIAL:  # the heads of each rank give a summand of the gradient
            blocks = {key: same(block, group) for key, block in blocks.items()}
        by_rows = style in (ROWS, SPLIT)
        bias = blocks.pop("bias", None) if by_rows else None
        if style in (COLUMNS, JOINED):
            x = same(x, group)
        elif style == SPLIT:
            x = x.chunk(group.size(), dim=-1)[group.rank()]
        module._parameters.update(dict.fromkeys(parameters) | blocks)
        try:
            out = undivided(x)
        finally:
            module._parameters.update(parameters)
        if style == JOINED:
            return joined(out, group)
        out = total(out, group) if by_rows else out
        return out if bias is None else out + bias

    return forward


def _chosen(module: Any, mesh: Any, group: ProcessGroup) -> Callable[..., torch.Tensor]:
    """The `forward` of experts of which this rank has `count`. Every other expert has the number `count`."""
    undivided = module.forward
    module.num_experts //= mesh.size()
    module._is_expert_parallel = True  # transformers: `num_experts` means none
    count, first = module.num_experts, mesh.get_local_rank() * module.num_experts

    def forward(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        parameters: dict[str, Any] = dict(module._parameters)
        module._parameters.update({key: weight.to_local() for key, weight in parameters.items()})
        outside = (chosen < first) | (chosen >= first + count)
        try:
            out = undivided(
                same(x, group),
                (chosen - first).masked_fill(outside, count),
                same(shares, group).masked_fill(outside, 0.0),
            )
        finally:
            module._parameters.update(parameters)
        return total(out, group)

    return forward


def _looked_up(module: Any, mesh: Any, group: ProcessGroup) -> Callable[..., torch.Tensor]:
    """The `forward` of an embedding with this rank's block of tokens. Every other token gets zeros."""
    num_tokens = module.weight.shape[0]
    first = mesh.get_local_rank() * -(-num_tokens // mesh.size())
    looked_up = _multiplied(module, "", group)
    padding = module.padding_idx
    block = range(first, min(first + -(-num_tokens // mesh.size()), num_tokens))
    module.padding_idx = padding - first if padding in block else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        outside = (ids < block.start) | (ids >= block.stop)
        rows = looked_up((ids - first).masked_fill(outside, 0))
        return total(rows.masked_fill(outside[..., None], 0.0), group)

    return forward
