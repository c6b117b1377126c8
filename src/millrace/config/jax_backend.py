"""What a trainer in JAX cannot do, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.config.schema import Config


def why_not_jax(config: Config) -> str:
    """The first reason. Empty: there is none."""
    return next(_reasons(config), "")


def _reasons(config: Config) -> Iterator[str]:
    adapter, optimizer, trainer = config.adapter, config.optimizer, config.trainer
    needed = (
        ("adapter.kind", adapter.kind if adapter.rank else "lora", "lora", "only LoRA was written for JAX"),
        ("optimizer.rule", optimizer.rule, "adamw", "only AdamW was written for JAX"),
        ("optimizer.states", optimizer.states, "float32", "JAX keeps its moments in float32"),
        ("trainer.offload", trainer.offload, False, "its state stays on the devices: divide it by more"),
        ("trainer.standby", trainer.standby, False, "a TPU serves one process at a time"),
        ("trainer.hosts", trainer.hosts if adapter.rank else 1, 1, "an adapter was never tried on several"),
        ("rollout.colocated", config.rollout.colocated, False, "it cannot give its memory to replicas"),
        ("sampling.routing", config.sampling.routing, False, "it has no mixtures of experts"),
    )
    for key, value, only, reason in needed:
        if value != only:
            remedy = f'Set it to {_written(only)}, or the backend to "torch"'
            yield f"cannot do `{key}` ({_written(value)}): {reason}.\n  {remedy}"


def _written(value: object) -> str:
    """The value as in a configuration file."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
