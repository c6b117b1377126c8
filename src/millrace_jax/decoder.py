"""A decoder as the trainer in JAX computes it, from its Hugging Face configuration, with rotary frequencies
by the formulas of their papers. No code here depends on the length of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from millrace.core.errors import DataError, boundary
from millrace.core.supported import FULL, GEMMA, JAX_TRAINER, activation, refuse_unsupported
from millrace_jax.adapted_matmul import MergeRule

EVERYWHERE = 1 << 30
"""The window of a layer without a window: more than any number of tokens."""

_ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
_GATED = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder. L layers.

    layer_shapes     of each tensor of a layer, by its name in the layer, in state-dict order
    activation       of the gate, as transformers names it
    embedding_scale  factor of the embeddings of tokens
    padding          a token whose embedding gets no gradient, as in transformers
    norm_from_one    the factor of a norm is 1 + its weight
    norms_after      attention and the gated matrices have a norm behind them too
    scale, cap       of attention's scores: a score z is cap * tanh(z / cap)
    logits_cap       the same of logits
    windows_L        tokens that a layer's attention sees, its own included
    merging          of the adapter, if the weights have one
    ropes, rope_L    the frequencies of rotary embeddings, and which of them a layer has
    """

    vocab: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    activation: str
    embedding_scale: float
    padding: int | None
    norm_from_one: bool
    norms_after: bool
    scale: float
    cap: float | None
    logits_cap: float | None
    windows_L: NDArray[np.int32]
    ropes: tuple[Frequencies, ...]
    rope_L: NDArray[np.int32]
    layer_shapes: dict[str, tuple[int, ...]]
    merging: MergeRule | None = None


def read_architecture(path: Path) -> Decoder:
    """Raises: DataError: `path` has no usable config.json, or the trainer cannot compute the model."""
    with boundary("trainer", f"`model.path`: read {path / 'config.json'}", DataError):
        config = AutoConfig.from_pretrained(path)
    refuse_unsupported(config, JAX_TRAINER)
    return architecture_of(config)


def architecture_of(config: Any) -> Decoder:
    """The architecture of a supported Hugging Face configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gemma = config.model_type in GEMMA
    scalar = config.query_pre_attn_scalar if gemma else head_dim
    types, ropes, rope_L = _ropes(config, head_dim)
    return Decoder(
        vocab=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        activation=activation(config),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        padding=config.pad_token_id,
        norm_from_one=gemma,
        norms_after=gemma,
        scale=scalar**-0.5,
        cap=getattr(config, "attn_logit_softcapping", None),
        logits_cap=getattr(config, "final_logit_softcapping", None),
        windows_L=_windows(config, types),
        ropes=ropes,
        rope_L=rope_L,
        layer_shapes=_layer_shapes(config, head_dim),
    )


def _types(config: Any) -> list[str]:
    """The type of each layer's attention."""
    types = getattr(config, "layer_types", None)
    if types:
        return list(types)
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    return ["sliding_attention" if windowed else FULL] * config.num_hidden_layers


def _windows(config: Any, types: list[str]) -> NDArray[np.int32]:
    window = getattr(config, "sliding_window", None) or EVERYWHERE
    return np.asarray([EVERYWHERE if each == FULL else window for each in types], np.int32)


def _ropes(config: Any, head_dim: int) -> tuple[list[str], tuple[Frequencies, ...], NDArray[np.int32]]:
    types, parameters = _types(config), config.rope_parameters
    if FULL not in parameters:
        return types, (frequencies(parameters, head_dim),), np.zeros(len(types), np.int32)
    kinds = sorted(parameters)
    ropes = tuple(frequencies(parameters[kind], head_dim) for kind in kinds)
    return types, ropes, np.asarray([kinds.index(each) for each in types], np.int32)


def _layer_shapes(config: Any, head_dim: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    matrices = {
        **dict(
            zip(
                _ATTENTION,
                ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)),
                strict=True,
            )
        ),
        **dict(zip(_GATED, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True)),
    }
    biased = set(_biased(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in matrices.items():
        if name == _GATED[0] and config.model_type in ("qwen3", "gemma3_text"):
            shapes |= {f"self_attn.{norm}.weight": (head_dim,) for norm in ("q_norm", "k_norm")}
        shapes[f"{name}.weight"] = shape
        if name in biased:
            shapes[f"{name}.bias"] = shape[:1]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.model_type in GEMMA:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return shapes | {f"{norm}.weight": (hidden,) for norm in norms}


def _biased(config: Any) -> tuple[str, ...]:
    """The matrices that have a bias."""
    if config.model_type == "qwen2":
        return _ATTENTION[:3]
    attention = _ATTENTION if getattr(config, "attention_bias", False) else ()
    return attention + (_GATED if getattr(config, "mlp_bias", False) else ())


# ---------------------------------------------------------------- rotary frequencies


@dataclass(frozen=True, eq=False)
class Frequencies:
    """`inverse`: radians a position, (head_dim / 2,) float32. `factor`: of cosines and sines."""

    inverse: NDArray[np.float32]
    factor: float = 1.0


def frequencies(parameters: Mapping[str, Any], head_dim: int) -> Frequencies:
    """The frequencies that `rope_parameters` of a configuration describe.

        default  theta^(-2 i / head_dim), i = 0 .. head_dim / 2 - 1      (arXiv:2104.09864)
        linear   the default / factor
        llama3   long waves / factor, short waves as they are, between them a blend (arXiv:2407.21783)
        yarn     the same blend over the index i, and a factor of the tables (arXiv:2309.00071)

    Raises: DataError: another type.
    """
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    inverse = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if kind == "default":
        return Frequencies(inverse)
    if kind == "linear":
        return Frequencies(inverse / np.float32(parameters["factor"]))
    if kind == "llama3":
        return Frequencies(_llama3(inverse, parameters))
    if kind == "yarn":
        return _yarn(inverse, parameters)
    raise DataError(f"`rope_type` {kind!r} has no formula in this trainer")


def _llama3(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> NDArray[np.float32]:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)  # of the frequency as it is
    return ((1 - share) * inverse / parameters["factor"] + share * inverse).astype(np.float32)


def _yarn(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> Frequencies:
    factor, theta = parameters["factor"], parameters["rope_theta"]
    original = parameters["original_max_position_embeddings"]
    dims = 2 * len(inverse)

    def index(turns: float) -> float:
        """Of the frequency that makes so many turns over the original length."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(parameters.get("beta_fast") or 32), index(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    blended = inverse / factor * ramp + inverse * (1 - ramp)
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = _yarn_scale(parameters)
    return Frequencies(blended.astype(np.float32), float(scale))


def _yarn_scale(parameters: Mapping[str, Any]) -> float:
    factor = parameters["factor"]

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)
