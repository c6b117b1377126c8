"""vLLM's own account of the versions that sampled a trajectory is compared with that of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engine_models import make_work

from millrace.core.errors import DigestMismatchError
from millrace.core.types import Finish, Progress, Sampling
from millrace.engines.vllm.async_engine import AsyncVllmEngine
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake

CACHE = SimpleNamespace(num_gpu_blocks=8, block_size=16)


class Vllm:
    """A `Frontend` of one request, whose tokens come as `outputs` say."""

    def __init__(self, outputs: Sequence[tuple[list[int], list[tuple[str, int]] | None]]) -> None:
        self.llm = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=CACHE))
        self._outputs = list(outputs)

    def add(self, requests: Sequence[dict[str, Any]]) -> None: ...

    def forget(self, name: str) -> None: ...

    def abort(self, name: str) -> None: ...

    def collect(self, wait_s: float) -> list[Any]:
        tokens, versions = self._outputs.pop(0)
        spans, start = [], 0
        for version, count in versions or ():
            spans.append(SimpleNamespace(version=version, start=start, end=start + count))
            start += count
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in tokens],
            cumulative_logprob=-1.0 * len(tokens),
            finish_reason="length",
            weight_versions=spans if versions else None,
        )
        finished = versions is not None
        return [
            SimpleNamespace(
                request_id="0.0",
                outputs=[completion],
                finished=finished,
                prompt_token_ids=[5],
                num_cached_tokens=0,
            )
        ]


class WithoutVllm(AsyncVllmEngine):
    def _request(self, continuation: Continuation) -> dict[str, Any]:
        self._begun[continuation.work.trajectory_id] = 0
        return {}


def played(*outputs: tuple[list[int], list[tuple[str, int]] | None], **sampling: Any) -> list[Progress]:
    intake = Intake(vocab=16, max_sequence_tokens=64, eos_ids=[3], decode=lambda ids: "".join(map(chr, ids)))
    settings = {"slots": 1, "seeded": False, "native": False, "computes": "", "drafts": None}
    engine = WithoutVllm(Vllm(outputs), intake, None, recompute=True, **settings)  # type: ignore[arg-type]
    engine.version = 7
    engine.submit([make_work(0, [5], Sampling(max_tokens=8, **sampling))])
    while not engine.has_finished:
        engine.step()
    return engine.take_progress()


def test_tokens_behind_a_stop_string_are_no_tokens_of_another_version() -> None:
    """Drafts bring several tokens at once, and so does a collector that was not emptied for a while."""
    (progress,) = played(([9, 8], None), ([7, 6, 3], [("7", 5)]), stop=("\x07",))
    assert list(progress.columns.tokens) == [9, 8, 7] and progress.finish is Finish.STOP


@pytest.mark.parametrize("versions", [[("6", 5)], [("7", 4), ("8", 1)], [("7", 4)]])
def test_another_version_is_refused(versions: list[tuple[str, int]]) -> None:
    with pytest.raises(DigestMismatchError, match="was sampled by versions"):
        played(([9, 8], None), ([7, 6, 3], versions))
