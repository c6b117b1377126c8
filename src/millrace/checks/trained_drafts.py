"""What does not go together with `rollout.drafts` = "trained": a drafter that is trained and published."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.core.errors import ConfigError


def refuse_trained_drafts(config: Config) -> None:
    """Raises: ConfigError: the run wants a trained drafter, and has what a drafter was not written for."""
    if config.rollout.drafts == "trained" and (reason := next(_reasons(config), "")):
        raise ConfigError(f'`rollout.drafts` ("trained") {reason}, or `rollout.drafts` to "earlier"')


def _reasons(config: Config) -> Iterator[str]:
    trainer = config.trainer
    needed = (
        ("trainer.backend", trainer.backend, "torch", "trains its head in torch"),
        *(
            (f"trainer.{key}", getattr(trainer, key), 1, "trains its head in one process, with whole weights")
            for key in ("shard", "tensor", "sequence")
        ),
        ("trainer.offload", trainer.offload, False, "reads the policy's head where it computes"),
        ("adapter.rank", config.adapter.rank, None, "is published with whole weights, not with an adapter"),
        ("rollout.colocated", config.rollout.colocated, False, "is trained while the trainer would be idle"),
    )
    for key, value, only, why in needed:
        if value != only:
            yield f"{why}, and `{key}` is {_written(value)}.\n  Set it to {_written(only)}"


def _written(value: object) -> str:
    """The value as in a configuration file."""
    if value is None or isinstance(value, bool):
        return '"none"' if value is None else str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
