"""A Hugging Face causal language model with float32 master weights and packed attention, and router replay:
each sampled token is trained with the experts that the engine sampled it with.

Engine and trainer round differently, so now and then their routers choose different experts, and the trainer
would train another policy than the one that sampled. R3, arXiv:2510.11370. The experts are the engine's, and
their shares are computed from the trainer's own logits: over all experts, so every router keeps its gradient.

Shape suffixes: T = tokens of a row, E = experts of a layer, K = experts of a token, W = layers with experts
x K.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from millrace.core.errors import DataError, boundary
from millrace.core.supported import TRAINER, is_no_parameter, refuse_unsupported
from millrace.devices.gpu import has_own_memory, on
from millrace.devices.low_rank import DOWN, KINDS
from millrace.devices.matmul import by_onednn, tile
from millrace.placement.memory.activation_memory import spares
from millrace.placement.model_directory import indexed_files
from millrace.trainer.batch.packing import Row, padded
from millrace.trainer.kernels import on_cpu, on_gpu, products
from millrace.trainer.kernels.fp8_matmul import quantise_layers
from millrace.trainer.kernels.fused_attention import serves
from millrace.trainer.kernels.products import rounded_once
from millrace.trainer.ranks.blocks import computing_device
from millrace.trainer.ranks.gathering import gathered_rounded, target_logprobs
from millrace.trainer.ranks.mesh import ALONE, Ranks, local
from millrace.trainer.recorded import OWN
from millrace.trainer.row_attention import NAME, plan

SMALL = 1 << 20  # numbers of a weight that is rounded together with others


def load_model(
    path: str | Path,
    device: torch.device,
    ranks: Ranks = ALONE,
    insert: Callable[[PreTrainedModel], None] | None = None,
    computing: torch.dtype = torch.float32,
    quantised: bool = False,
) -> PreTrainedModel:
    """The model in `path`, in float32, without dropout, with this rank's blocks of the weights.

    `insert`: gives the model layers of an adapter, before it is divided. The layers have no numbers yet.
    `computing`: of the matmuls. Ranks gather a layer's weights in this format (`ranks.divided`).
    `quantised`: its layers compute in fp8 while weights are served.

    Raises:
        ConfigError: `quantised`, and the GPU cannot.
        DataError: not a model directory; an unknown architecture; weights that are damaged, missing, left
        over,
            reshaped or not finite; an output projection that should be the embedding and is not; or a model
            that the trainer does not compute right (`core.supported`).
    """
    if not (Path(path) / "config.json").is_file():
        raise DataError(f"`model.path` ({path}) is not a model directory: it has no config.json")
    config = _check_known(Path(path))
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    if not ranks.alone:
        from millrace.trainer.ranks.divided import load_divided

        load = partial(load_divided, config=config, ranks=ranks, computing=computing)
        load = partial(load, forward=_pair_logprobs, insert=insert)
    logging.disable_progress_bar()  # a worker's stderr is a log
    with boundary("trainer", f"`model.path`: load the model in {path}", DataError):
        model, loaded = load(
            path,
            dtype=torch.float32,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
        )
    _check_complete(model, loaded, path, ranks)
    if insert is not None and ranks.alone:
        insert(model)
    install_kernels(model, device, ranks, quantised=quantised)
    install_replay(model)
    model.to("cpu" if ranks.offload else device)
    model.computes_on = device
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _check_known(path: Path) -> PretrainedConfig:
    indexed_files(path)  # transformers would read whatever file an index names
    with boundary("trainer", f"`model.path`: read {path / 'config.json'}", DataError):
        model_type = msgspec.json.decode((path / "config.json").read_bytes()).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise DataError(
            f"`model.path` ({path}): the installed transformers knows no architecture {model_type!r} "
            f"(`model_type` in config.json). Use a model of these families: {', '.join(TRAINER.families)}"
        )
    with boundary("trainer", f"`model.path`: read {path / 'config.json'}", DataError):
        config = AutoConfig.from_pretrained(path)
    refuse_unsupported(config, TRAINER)
    return config


def _check_complete(model: PreTrainedModel, loaded: dict[str, Any], path: str | Path, ranks: Ranks) -> None:
    """Refuse missing and unknown tensors, which transformers invents and drops without an error."""
    trained = {name: weight for name, weight in named_weights(model).items() if not name.endswith(KINDS)}
    faults = {
        "missing": [name for name in loaded["missing_keys"] if not name.endswith(KINDS)],
        "left over": [name for name in loaded["unexpected_keys"] if not is_no_parameter(name)],
        "of another shape": [key[0] if isinstance(key, tuple) else key for key in loaded["mismatched_keys"]],
        "not finite": not_finite(trained, ranks),
        "that should be one and differ": _untied(model),
    }
    problems = [f"{fault}: {', '.join(sorted(names)[:4])}" for fault, names in faults.items() if names]
    if problems:
        raise DataError(
            f"`model.path` ({path}): the weights are not whole: tensors {'; '.join(problems)}. "
            "Fetch the model again, or save it anew with `save_pretrained`"
        )


@contextlib.contextmanager
def compute_dtype(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Matmuls in `dtype`; weights, norms and reductions stay float32. torch's cache of rounded weights would
    keep a copy of every weight until the block ends."""
    with torch.autocast(device.type, dtype=dtype, enabled=dtype.itemsize < 4, cache_enabled=False):
        yield


@contextlib.contextmanager
def served_weights(
    model: PreTrainedModel, *, published: torch.dtype, computing: torch.dtype
) -> Iterator[None]:
    """Inside the block `model` computes with the weights of the replicas: rounded to `published`.

    So its log-probs are those of the policy that sampled. Gradients are taken at the rounded weights and
    applied to the master weights, which come back at the end. Matmuls in `published` (`compute_dtype`) round
    their matrices themselves. With matmuls in float32 the block costs a copy of the weights.
    """
    named = rounded_weights(model, published=published, computing=computing)
    rounded = [local(parameter) for parameter in named.values()]
    masters = [torch.empty_like(weight) for weight in rounded]
    _copy(rounded, masters)
    small = [weight for weight in rounded if weight.numel() <= SMALL]  # a layer has many: one call for all
    try:
        for weights in (small, *([weight] for weight in rounded if weight.numel() > SMALL)):
            _round(weights, published)
        with rounded_once(model, computing):
            yield
    finally:
        _copy(masters, rounded)


def _round(weights: list[torch.Tensor], dtype: torch.dtype) -> None:
    _copy(weights, narrow := [torch.empty_like(weight, dtype=dtype) for weight in weights])
    _copy(narrow, weights)


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def rounded_weights(
    model: PreTrainedModel, *, published: torch.dtype, computing: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    """The parameters that `served_weights` changes for a while."""
    rounds = set[torch.Tensor]() if computing == torch.float32 else _matrices(model) | gathered_rounded(model)
    named = dict(model.named_parameters()) if published != torch.float32 else {}
    return {name: p for name, p in named.items() if p.requires_grad and p not in rounds}


def _matrices(model: PreTrainedModel) -> set[torch.Tensor]:
    """The weights that only matmuls read, which round them. An embedding is looked up, even if it is the
    output projection. A CPU computes logits in float32, so their projection must be rounded before."""
    matrices = {module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    matrices.discard(model.get_input_embeddings().weight)
    if not has_own_memory(model.device):
        matrices.discard(model.get_output_embeddings().weight)
    return matrices


def vocabulary(model: PreTrainedModel) -> int:
    """Token ids are below this."""
    return len(model.get_output_embeddings().weight)


def row_logprobs(
    model: PreTrainedModel,
    row: Row,
    *,
    temperature: float,
    dtype: torch.dtype,
    value_head: torch.nn.Module | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of the trained tokens of `row`: (N,) float32 each, in nats. With `value_head`
    also the value of the state before each token.

    Sequences that share a token share its log-prob: the output projection sees each of the P pairs of source
    and target once. With token masks every token has a pair of its own, because masks may differ.
    """
    if row.masks_N is None:
        size = vocabulary(model)
        pairs_P, pair_N = np.unique(row.sources_N * size + row.targets_N, return_inverse=True)
        sources_P, targets_P = np.divmod(pairs_P, size)
    else:
        sources_P, targets_P = row.sources_N, row.targets_N
    forward = getattr(model, "pair_logprobs", partial(_pair_logprobs, model))
    outputs: tuple[torch.Tensor, ...] = forward(row, sources_P, targets_P, temperature, dtype, value_head)
    if not outputs[0].requires_grad and hasattr(model, "reshard"):
        model.reshard()  # without a backward pass nothing else divides the weights again
    if row.masks_N is not None:
        return outputs
    index_N = on(outputs[0].device, pair_N)
    # `embedding`, because its backward sums repeats in a fixed order on every device.
    return tuple(embedding(index_N, x_P[:, None])[:, 0] for x_P in outputs)


def _pair_logprobs(
    model: PreTrainedModel,
    row: Row,
    sources_P: NDArray[np.int64],
    targets_P: NDArray[np.int64],
    temperature: float,
    dtype: torch.dtype,
    value_head: torch.nn.Module | None,
) -> tuple[torch.Tensor, ...]:
    """The computation of `row_logprobs` that reads weights."""
    device, ranks = computing_device(model), getattr(model, "ranks", ALONE)
    if ranks.undivided_matmuls and device.type == "cpu" and by_onednn():
        size = tile(model.config.hidden_size)
        row = padded(row, size)  # pairs are padded too; nobody reads the results of padding
        if row.masks_N is None:
            sources_P, targets_P = (np.pad(x_P, (0, -len(x_P) % size)) for x_P in (sources_P, targets_P))
    put = partial(on, device)
    with compute_dtype(device, dtype):
        hidden_1TH = model.base_model(
            input_ids=put(row.tokens_T)[None],
            position_ids=put(row.positions_T)[None],
            use_cache=False,
            packed=plan(
                row.segments,
                device,
                window=getattr(model.config, "sliding_window", None),
                group=ranks.group("sequence"),
                ragged=serves(device, dtype, model.config),
            ),
            **replayed(model, row.routing_TW, device),
        ).last_hidden_state
    hidden_PH = embedding(put(sources_P), hidden_1TH[0])
    values = () if value_head is None else (value_head(hidden_PH),)
    head = model.get_output_embeddings()
    compute = getattr(head, "target_logprobs", partial(target_logprobs, head))
    cap = getattr(model.config, "final_logit_softcapping", None)
    temperature *= getattr(model.config, "logits_scaling", 1.0)
    logprobs = compute(hidden_PH.to(dtype), targets_P, row.masks_N, ranks, temperature, cap)
    return *logprobs, *values


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep each layer's input only, and compute the layer again in the backward pass. Matrices with an
    adapter are merged for one product, as copies of all of them would cost what is spared."""
    for adapted in (module for module in model.modules() if hasattr(module, DOWN)):
        vars(adapted).pop("forward", None)
    for layer in model.base_model.layers:
        setattr(layer, on_gpu.ADDS, True)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every weight once, under its name in the Hugging Face state dict; tied copies are left out."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _untied(model: PreTrainedModel) -> list[str]:
    """The head and the embedding if the configuration ties them and the file has two different tensors:
    transformers then does not tie them."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or head.weight is embedding.weight:
        return []
    return ["lm_head.weight", "model.embed_tokens.weight"]


def not_finite(weights: Mapping[str, torch.Tensor], ranks: Ranks = ALONE) -> list[str]:
    """Names of the tensors with a NaN or an infinity on any rank. With several ranks a collective call.
    A sum shows both, and costs no memory."""
    blocks = {name: local(weight) for name, weight in weights.items()}
    finite = torch.stack([block.sum().double() for block in blocks.values()]).isfinite().tolist()
    suspects = [name for name, is_finite in zip(blocks, finite, strict=True) if not is_finite]
    broken = [name for name in suspects if not blocks[name].isfinite().all()]  # a sum can also overflow
    on_any_rank = {name for names in ranks.gather(broken) for name in names}
    return [name for name in weights if name in on_any_rank]


def install_kernels(
    model: PreTrainedModel, device: torch.device, ranks: Ranks, *, quantised: bool = False
) -> None:
    """Replace slow parts of `model`. A tensor rank's blocks of layers stay as transformers computes them.
    `quantised`: see `load_model`."""
    if quantised:
        quantise_layers(model, device)
    if device.type == "cpu" and ranks.undivided_matmuls:
        sparing = spares(model.num_parameters())
        on_cpu.install_linear(model)
        if sparing:
            on_cpu.install_gate(model)
        if ranks.alone:
            on_cpu.install_lookup(model)
        on_cpu.install_norm(model, sparing=sparing)
    if device.type == "cuda":
        on_gpu.activate(device)
        if ranks.tensor == 1:
            products.install_linear(model)
            on_gpu.install_experts(model)
            on_gpu.install_where_it_runs(model, device)


# ---------------------------------------------------------------- router replay


class _Recorded(threading.local):
    """The experts of the layer that this thread computes."""

    experts_TK: torch.Tensor | None = None


_RECORDED = _Recorded()


def install_replay(model: Any) -> None:
    """Let `model` replay, if it has experts: see `replayed`. Layers must not be wrapped yet: a layer that is
    recomputed needs the recorded experts again."""
    routed = [layer for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]
    routers = [layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router for layer in routed]
    for place, (layer, router) in enumerate(zip(routed, routers, strict=True)):
        router.forward = partial(_chosen, router, router.forward)
        layer.forward = partial(_layer, layer.forward, place, router.top_k)
        model.routed = len(routers), router.top_k, router.num_experts


def replayed(
    model: Any, routing_TW: NDArray[np.int32] | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass in which the recorded experts are used.

    Raises: DataError: another model sampled the tokens.
    """
    if routing_TW is None:
        return {}
    layers, top_k, experts = getattr(model, "routed", (0, 0, 0))
    if routing_TW.shape[1] != layers * top_k or routing_TW.max(initial=OWN) >= experts:
        raise DataError(
            f"trajectories have {routing_TW.shape[1]} recorded experts a token, up to number "
            f"{routing_TW.max(initial=OWN)}, and the model has {layers} layers with {top_k} of {experts} "
            "each: another model sampled them"
        )
    return {"routing": on(device, routing_TW.astype(np.int64))}


def _layer(forward: Any, place: int, top_k: int, *args: Any, routing: Any = None, **options: Any) -> Any:
    own = slice(place * top_k, (place + 1) * top_k)
    _RECORDED.experts_TK = None if routing is None else routing[:, own]
    try:
        return forward(*args, **options)
    finally:
        _RECORDED.experts_TK = None


def _chosen(router: Any, forward: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits_TE, shares_TK, experts_TK = forward(hidden)
    recorded_TK = _RECORDED.experts_TK
    if recorded_TK is None:
        return logits_TE, shares_TK, experts_TK
    experts_TK = torch.where(recorded_TK == OWN, experts_TK, recorded_TK)
    shares_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, experts_TK)
    if getattr(router, "norm_topk_prob", True):  # gpt-oss has a softmax over these experts alone
        shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
    return logits_TE, shares_TK.to(logits_TE.dtype), experts_TK
