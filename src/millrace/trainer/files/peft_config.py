"""What peft reads beside the tensors of an adapter. Names no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.config.tables.training import Adapter

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


def peft_config(layers: Iterable[str], adapter: Adapter, model_path: str) -> dict[str, Any]:
    """`layers`: the names of the matrices that have the adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "use_dora": adapter.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
