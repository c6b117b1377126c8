"""The architecture of a model: its dimensions, its parameters' names, its rotary tables.

Names, shapes and rotary frequencies are read from Hugging Face's own model on the meta device. So the engine
and the trainer cannot disagree about a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.core.errors import DataError, boundary
from millrace.core.supported import FULL, GEMMA, SINKS, TORCH_ENGINE, activation, refuse_unsupported

UNROTATED = "unrotated"  # a type of rotary embeddings: none


@dataclass(frozen=True)
class Architecture:
    """A decoder as the engine computes it.

    shapes           of parameters by name, in state-dict order
    activation       of the gate, as transformers names it; `clamp`: alpha and limit of `gates.clamped`
    embedding_scale  factor of the embeddings of tokens; `residual_scale`: of what joins the residual stream
    norm_from_one    the factor of a norm is 1 + its weight
    scale, cap       of attention's scores, and sinks, and each layer's window: see `attention.Kernel`
    logits_cap       a logit z is logits_cap * tanh(z / logits_cap)
    logits_scale     a logit is divided by it first
    routed           number of experts of a row, 0 without experts; `routed_sum_1`: their weights' sum is 1
    ropes            of each layer, the type of its rotary embeddings; None: all layers have the same
    neighbours       rotary embeddings turn neighbouring numbers of a head; False: numbers half of it apart
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool
    activation: str
    clamp: tuple[float, float] | None
    embedding_scale: float
    residual_scale: float
    norm_from_one: bool
    scale: float
    cap: float | None
    sinks: bool
    logits_cap: float | None
    logits_scale: float
    routed: int
    routed_sum_1: bool
    windows: tuple[int | None, ...]
    ropes: tuple[str | None, ...]
    neighbours: bool
    shapes: dict[str, tuple[int, ...]]
    config: Any

    def rotary_tables(
        self, rope: str | None, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (num_positions, the rotated part of head_dim), from the family's own rotary
        module. `rope`: one of `ropes`."""
        with torch.device("meta"):
            rotary_class = type(AutoModelForCausalLM.from_config(self.config).model.rotary_emb)
        positions = torch.arange(num_positions)[None]
        of_layers = {} if rope in (None, UNROTATED) else {"layer_type": rope}
        cos, sin = rotary_class(self.config)(torch.empty(0, dtype=dtype), positions, **of_layers)
        if rope == UNROTATED:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        if self.config.model_type == "gpt_oss":  # which has each angle once
            cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        return cos[0].to(device), sin[0].to(device)


def read_architecture(model_path: str) -> Architecture:
    """Read `config.json` of a Hugging Face model directory.

    Raises: DataError: the directory has no configuration, or the engine cannot run the model.
    """
    with boundary(model_path, "no usable model configuration", DataError):
        config = AutoConfig.from_pretrained(model_path)
    with boundary(model_path, "its config.json is of no model that can be built", DataError):
        return architecture_of(config)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a Hugging Face configuration. Raises: DataError if unsupported."""
    refuse_unsupported(config, TORCH_ENGINE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attentions = [layer.self_attn for layer in model.model.layers]
    window = getattr(
        config, "sliding_window", None
    )  # of every layer, if a family's layers have no such field
    layered = FULL in (config.rope_parameters or {})
    gemma, sinks = (config.model_type in families for families in (GEMMA, SINKS))
    return Architecture(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        activation=activation(config),
        clamp=_clamp(config) if sinks else None,
        embedding_scale=config.hidden_size**0.5 if gemma else getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        norm_from_one=gemma,
        scale=attentions[0].scaling,
        cap=getattr(config, "attn_logit_softcapping", None),
        sinks=sinks,
        logits_cap=getattr(config, "final_logit_softcapping", None),
        logits_scale=getattr(config, "logits_scaling", 1.0),
        routed=getattr(config, "num_experts_per_tok", 0),
        routed_sum_1=getattr(config, "norm_topk_prob", sinks),
        windows=tuple(getattr(each, "sliding_window", window) for each in attentions),
        ropes=tuple(
            each.layer_type if layered else None if getattr(each, "use_rope", True) else UNROTATED
            for each in attentions
        ),
        neighbours=config.model_type == "glm4",
        shapes=shapes,
        config=config,
    )


def _clamp(config: Any) -> tuple[float, float]:
    """Alpha and limit of gpt-oss. Older releases of transformers have them in their code only."""
    return getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
