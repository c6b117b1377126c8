"""Which models are computed right: one list for the engine and the trainer, which must agree on every logit.

Another model may load and run, and compute wrong numbers. No code here computes attention windows, scaled or
capped logits, or frequencies that depend on the length of the sequence.
"""

from __future__ import annotations

from typing import Any

from millrace.core.errors import DataError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refuse_unsupported(config: Any) -> None:
    """`config`: a Hugging Face configuration, with its defaults filled in.

    Raises: DataError naming what is not computed.
    """
    if config.model_type not in FAMILIES:
        raise DataError(
            f"Millrace cannot run `model_type` {config.model_type!r}; it runs {', '.join(FAMILIES)}.\n"
            "  Others may differ in their attention or their logits. Use a model of these families"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    layers = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    wrong = ""
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        wrong = (
            f"rotary embeddings of type {rope['rope_type']!r} (their frequencies depend on the sequence's "
            f"length); it runs {', '.join(ROPE_TYPES)}"
        )
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong = f"rotary embeddings of a part of a head ({rope['partial_rotary_factor']:g} of it)"
    elif layers:
        wrong = f"attention layers of type {', '.join(layers)}; it runs full attention only"
    elif config.hidden_act != "silu":
        wrong = f"`hidden_act` {config.hidden_act!r}; it runs 'silu' only"
    if wrong:
        raise DataError(f"Millrace cannot run this {config.model_type} model: it has {wrong}")
