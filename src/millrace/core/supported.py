"""Which models the trainer and each engine compute correctly, and what in their files is not for them.

Another model may load and run, and give wrong numbers. No code of Millrace computes frequencies that depend
on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from millrace.core.errors import DataError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MXFP4 = "mxfp4"  # a method of quantization, as transformers names it
DRAFTER = "drafter."
"""Names of a trained drafter's tensors begin so, in a version of weights and in a checkpoint."""
FULL, WINDOWED = "full_attention", "sliding_attention"  # types of layers, as transformers names them


class Supported(NamedTuple):
    """`computer`: the trainer or engine, as the first words of a sentence. `activations` None: all work.
    `reasons`: why it refuses families that others run."""

    computer: str
    families: tuple[str, ...]
    activations: tuple[str, ...] | None = None
    otherwise: str = "Use a model of these families"
    reasons: Mapping[str, str] = {}


TRAINER = Supported(
    "The trainer",
    ("gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3",
     "qwen3_moe", "smollm3"),
)  # fmt: skip
TORCH_ENGINE = Supported(
    "The torch engine",
    TRAINER.families,
    ("gelu", "gelu_pytorch_tanh", "silu"),
    'Use a model of these families, or `rollout.engine = "vllm"`',
)
JAX_TRAINER = Supported(
    "The trainer in JAX",
    ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
    ("gelu", "gelu_pytorch_tanh", "silu"),
    'Use a model of these families, or `trainer.backend = "torch"`',
    reasons=dict.fromkeys(("gpt_oss", "qwen3_moe"), "its layers have experts, and it computes none"),
)
VLLM = Supported(
    "A replica with vLLM",
    ("gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    otherwise='Use a model of these families, or `rollout.engine = "own"`',
    reasons={
        "gemma2": "on a CPU its log-probs are 3e-4 from those of transformers, and the proof allows 1e-4",
        "smollm3": "vLLM has no code for it, and changes that of transformers, with which loads are proved",
    },
)
"""vLLM runs more families. The tests of engines pass with these families, with vLLM 0.32."""
_MIXTURE = "vLLM's own reload, by which a server loads, leaves its experts as they were"
SERVER = VLLM._replace(
    computer="A server",
    families=tuple(family for family in VLLM.families if family not in ("gpt_oss", "qwen3_moe")),
    reasons={**VLLM.reasons, "gpt_oss": _MIXTURE, "qwen3_moe": _MIXTURE},
)
VLLM_QUANTISED = Supported(
    "A replica with `rollout.quantization`",
    ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"),
    otherwise="Use a model of these families, or leave `rollout.quantization` out",
)
"""The tests of quantised replicas pass with these families."""
GEMMA = ("gemma2", "gemma3_text")
CAPS = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": ("final_logit_softcapping",),
}
"""By family: the caps that the code of the family applies. Other code ignores these keys."""
PARTIAL_ROTARY = ("glm4", "phi3")
"""Families that rotate a part of a head where `partial_rotary_factor` says so."""
NORMS_AFTER = (*GEMMA, "glm4")
"""Families that also normalise what attention and the gated matrices put out."""
SINKS = ("gpt_oss",)
"""Families whose query heads each have an attention sink: one more score, of no key."""
_TEXT_PART = "it is for images too. `millrace text-part MODEL DIRECTORY` makes a model of its text part"
REASONS = {
    "deepseek_v3": "it has latent attention, and a router with groups and a bias",
    "gemma3": _TEXT_PART,
    "ministral3": "its queries are scaled by their position",
    "mistral3": _TEXT_PART,
    "mixtral": "its experts have other names in files",
    "olmo2": "it normalises queries and keys over all heads together",
}
"""Why well-known families are refused."""


def is_no_parameter(name: str) -> bool:
    """Whether a tensor of a model's files is left out: it can be computed, or it is of a trained drafter."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith(DRAFTER)


def refuse_unsupported(config: Any, supported: Supported) -> None:
    """`config`: a Hugging Face configuration, with its defaults filled in.

    Raises: DataError that names the unsupported part.
    """
    if config.model_type not in supported.families:
        reasons = {**REASONS, **supported.reasons}
        reason = reasons.get(config.model_type, "others may differ in their attention or their logits")
        raise DataError(
            f"{supported.computer} cannot run `model_type` {config.model_type!r}: {reason}.\n"
            f"  It runs {', '.join(supported.families)}. {supported.otherwise}"
        )
    wrong = _wrong_weights(config) or _wrong_rope(config) or _wrong_attention(config, supported)
    if wrong:
        raise DataError(f"{supported.computer} cannot run this {config.model_type} model: it has {wrong}")


def activation(config: Any) -> str:
    """Gemma's key comes first: files of Gemma models have the other key too."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _wrong_weights(config: Any) -> str:
    if not (quantization := getattr(config, "quantization_config", None)):
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method == MXFP4:
        return f"{MXFP4} weights. `millrace dequantize MODEL DIRECTORY` writes them in bfloat16"
    return f"quantized weights ({method}); it runs weights in bfloat16, float16 and float32 only"


def _wrong_rope(config: Any) -> str:
    parts = config.model_type in PARTIAL_ROTARY
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            return (
                f"rotary embeddings of type {kind!r} (their frequencies depend on the sequence's length); "
                f"it runs {', '.join(ROPE_TYPES)}"
            )
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0 and not parts:
            return f"rotary embeddings of a part of a head ({part:g} of it)"
    return ""


def _ropes(rope: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Settings of rotary embeddings: one for all layers, or one for each type of layers."""
    if not rope:
        return []
    layered = [rope[name] for name in (FULL, WINDOWED) if rope.get(name)]
    return layered or [rope]


def _wrong_attention(config: Any, supported: Supported) -> str:
    if layers := sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, WINDOWED}):
        return f"attention layers of type {', '.join(layers)}; it runs {FULL}, {WINDOWED} only"
    if supported.activations is not None and (name := activation(config)) not in supported.activations:
        return f"`hidden_act` {name!r}; it runs {', '.join(map(repr, supported.activations))} only"
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, key, None) and key not in CAPS.get(config.model_type, ()):
            return f"`{key}` {getattr(config, key)!r}"
    return ""
