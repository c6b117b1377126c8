"""One set of weights, fused for inference, with a view of every tensor under its Hugging Face name.

Query, key and value projections lie one under another in one matrix, gate and up projections in another.
Row slices of a row-major matrix are contiguous, so each named tensor is a plain byte range of a matrix that
the engine multiplies with. Pulls write into these views, and digests read them. There is no second copy that
could differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace.core.digest import MULTILINEAR, XXH3, NamedBuffer, digest_buffers, version_digest
from millrace.core.errors import DataError
from millrace.core.supported import DRAFTER, is_no_parameter
from millrace.devices.gpu import has_own_memory, tensor_digests
from millrace.devices.large_memory import each
from millrace.devices.served_weights import read_tensors
from millrace.engines.own.architecture import Architecture

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layer:
    """The tensors of one decoder layer. `out_norm` and `down_norm` apply to outputs before they join the
    residual stream.

    With a `router`, `gate_up`, `down` and their biases have one more dimension, the first: the experts.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    out_norm: Tensor | None
    mlp_norm: Tensor
    router: Tensor | None
    router_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    down_norm: Tensor | None


class Parameters:
    """Weights of `architecture` in `dtype` on `device`, uninitialised until loaded or pulled into."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = architecture.shapes, dtype, device
        self._clamped = architecture.clamp is not None  # gpt-oss: its matrices lie transposed
        views: dict[str, Tensor] = {}
        self._views = views
        self.embedding = self._allocate("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(architecture.num_layers)]
        self.norm = self._allocate("model.norm.weight")
        self.head = self.embedding if architecture.tied else self._allocate("lm_head.weight")
        self._beside = [name for name in self._shapes if name.startswith(DRAFTER)]  # of a drafter
        for name in self._beside:
            self._allocate(name)
        unused = sorted(set(self._shapes) - set(views))
        if unused:
            raise DataError(f"the torch engine knows no use for these parameters of the model: {unused[:8]}")
        self.named: dict[str, Tensor] = {name: views[name] for name in self._shapes}

    def buffers(self, dtype: torch.dtype | None = None) -> Iterator[NamedBuffer]:
        """Every tensor as bytes, of `dtype` if given, in state-dict order. On the CPU and in their own dtype
        the buffers are writable views. Otherwise each buffer is a copy, made when its turn comes."""
        dtype = dtype or self._dtype
        return (_as_buffer(name, tensor.to("cpu", dtype)) for name, tensor in self.named.items())

    def places(self) -> list[NamedBuffer]:
        """Every tensor as writable bytes on its device. On a GPU `data` is a tensor of uint8."""
        if not has_own_memory(self._device):
            return list(self.buffers())
        dtype_name = str(self._dtype).removeprefix("torch.")
        return [
            NamedBuffer(name, dtype_name, tuple(tensor.shape), tensor.view(-1).view(torch.uint8))
            for name, tensor in self.named.items()
        ]

    def digest(self, dtype: torch.dtype | None = None, kind: str = XXH3) -> str:
        """Digest of the tensors as `buffers` gives them. A GPU computes the kind MULTILINEAR itself."""
        if kind != MULTILINEAR or not has_own_memory(self._device):
            return digest_buffers(self.buffers(dtype), kind, each=each)
        dtype = dtype or self._dtype
        digests = tensor_digests(self.named.values(), dtype)
        dtype_name = str(dtype).removeprefix("torch.")
        entries = zip(self.named.items(), digests, strict=True)
        return version_digest(((n, dtype_name, tuple(t.shape), digest) for (n, t), digest in entries), kind)

    def load(self, model_path: str) -> None:
        """Fill every tensor from the safetensors files of a Hugging Face directory. A drafter that the files
        do not have gets zeros.

        Raises: DataError: a tensor is missing, unknown, of another shape, or an untied head that should be
        tied.
        """
        targets = dict(expert_by_expert(self.named.items()))
        missing, heads = set(targets) - set(self._beside), []
        for name in self._beside:
            targets[name].zero_()
        for name, tensor in expert_by_expert(read_tensors(Path(model_path))):
            target = targets.get(name)
            if target is None:
                if is_no_parameter(name):
                    continue
                if name == "lm_head.weight":
                    heads.append(tensor)
                    continue
                raise DataError(f"{model_path}: tensor {name!r} is not a parameter of this model")
            if target.shape != tensor.shape:
                raise DataError(
                    f"{model_path}: {name} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}"
                )
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise DataError(f"{model_path}: {len(missing)} tensors are missing: {sorted(missing)[:8]}")
        if any(not torch.equal(head.to(self.head), self.head) for head in heads):
            raise DataError(
                f"{model_path}: config.json ties `lm_head.weight` to the embedding, but the file holds "
                "another one. Set `tie_word_embeddings` to false there, or remove the tensor"
            )

    def copy_from(self, source: Parameters) -> None:
        for name, tensor in self.named.items():
            tensor.copy_(source.named[name], non_blocking=True)

    def _layer(self, prefix: str) -> Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        gate_up = self._projections(mlp + "gate_up", mlp + "gate", mlp + "up")
        gate_up_bias, down_bias = [mlp + "gate_proj.bias", mlp + "up_proj.bias"], mlp + "down_proj.bias"
        down, gate = mlp + "down_proj.weight", mlp + ("router" if self._clamped else "gate")
        router = self._optional(gate + ".weight")
        if router is not None:
            gate_up, down = [mlp + "experts.gate_up_proj"], mlp + "experts.down_proj"
            gate_up_bias, down_bias = [f"{gate_up[0]}_bias"], f"{down}_bias"
        out_norm, down_norm = f"{prefix}post_self_attn_layernorm.weight", f"{prefix}post_mlp_layernorm.weight"
        mlp_norm = f"{prefix}post_attention_layernorm.weight"
        if f"{prefix}pre_feedforward_layernorm.weight" in self._shapes:  # Gemma has other names
            out_norm, mlp_norm = mlp_norm, f"{prefix}pre_feedforward_layernorm.weight"
            down_norm = f"{prefix}post_feedforward_layernorm.weight"
        return Layer(
            input_norm=self._allocate(prefix + "input_layernorm.weight"),
            qkv=self._allocate(*self._projections(attention + "qkv", *(attention + x for x in "qkv"))),
            qkv_bias=self._optional(*(f"{attention}{x}_proj.bias" for x in "qkv")),
            q_norm=self._optional(attention + "q_norm.weight"),
            k_norm=self._optional(attention + "k_norm.weight"),
            sinks=self._optional(attention + "sinks"),
            out=self._allocate(attention + "o_proj.weight"),
            out_bias=self._optional(attention + "o_proj.bias"),
            out_norm=self._optional(out_norm),
            mlp_norm=self._allocate(mlp_norm),
            router=router,
            router_bias=self._optional(gate + ".bias"),
            gate_up=self._matrices(*gate_up),
            gate_up_bias=self._optional(*gate_up_bias),
            down=self._matrices(down),
            down_bias=self._optional(down_bias),
            down_norm=self._optional(down_norm),
        )

    def _projections(self, fused: str, *separate: str) -> list[str]:
        """Names of projections that lie one under another: one name in families that fuse them."""
        names = [f"{name}_proj.weight" for name in (fused, *separate)]
        return names[:1] if names[0] in self._shapes else names[1:]

    def _matrices(self, *names: str) -> Tensor:
        """With outputs as rows, where they are columns in files, too."""
        return self._allocate(*names).mT if self._clamped else self._allocate(*names)

    def _optional(self, *names: str) -> Tensor | None:
        return self._allocate(*names) if names[0] in self._shapes else None

    def _allocate(self, *names: str) -> Tensor:
        """One tensor with the named tensors one under another, and a view of each."""
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        fused = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for name, view in zip(names, fused.split(rows), strict=True):
            self._views[name] = view
        return fused


def expert_by_expert(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as model files have them. In memory all experts of a layer are two tensors; in files
    each projection of each expert is one tensor."""
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, tensor
            continue
        projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for index, expert in enumerate(tensor):
            for projection, rows in zip(projections, expert.chunk(len(projections)), strict=True):
                yield f"{stem}.{index}.{projection}.weight", rows


def _as_buffer(name: str, tensor: Tensor) -> NamedBuffer:
    assert tensor.is_contiguous(), name
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return NamedBuffer(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
