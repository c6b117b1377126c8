"""Counts of draft tokens, by vLLM's own statistics."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from millrace.core.types import ReplicaLoad


class DraftCounts:
    """A logger of statistics, as vLLM calls it after each step. Its factory is `made`."""

    def __init__(self) -> None:
        self.drafted, self.accepted = 0, 0

    def made(self, vllm_config: Any, engine_index: int = 0) -> DraftCounts:
        return self

    def record(self, scheduler_stats: Any, *others: Any, **named: Any) -> None:
        counts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if counts is not None:
            self.drafted += counts.num_draft_tokens
            self.accepted += counts.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *state: Any, **named: Any) -> None: ...

    def added(self, load: ReplicaLoad) -> ReplicaLoad:
        return replace(load, drafted_tokens=self.drafted, accepted_tokens=self.accepted)
