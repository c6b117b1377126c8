"""What does not go together with `rollout.native_adapters`: an adapter is computed beside the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.config.schema import Config

RANK_MAX = 512
"""vLLM has no larger slot for an adapter."""


def why_not_native(config: Config) -> str:
    """The first reason, with its remedy. Empty: there is none."""
    return next(_reasons(config), "")


def _reasons(config: Config) -> Iterator[str]:
    adapter, rollout = config.adapter, config.rollout
    if adapter.rank is None:
        yield 'needs an adapter, and `adapter.rank` is "none".\n  Set it to 8, or leave this out'
    elif adapter.rank > RANK_MAX:
        yield f"has ranks up to {RANK_MAX}, and `adapter.rank` is {adapter.rank}.\n  Lower it"
    if adapter.kind != "lora":
        yield (
            f'has no DoRA magnitudes, and `adapter.kind` is "{adapter.kind}".\n'
            '  Set it to "lora", or leave this out: adapters are merged then'
        )
    if rollout.tensor > 1:
        yield f"has one device, and `rollout.tensor` is {rollout.tensor}.\n  Set it to 1"
    if rollout.quantization is not None:
        yield (
            "was not tried beside rounded weights, and `rollout.quantization` is "
            f'"{rollout.quantization}".\n  Leave one of them out'
        )
    if rollout.colocated:
        yield (
            "keeps the base weights in memory, and with `rollout.colocated` (true) they are dropped each "
            "turn.\n  Leave one of them out"
        )
