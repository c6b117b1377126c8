"""A load into vLLM is proved, whole, or not served."""

from __future__ import annotations

import pytest
from bench import Bench, OpenBench, prompt_of

from millrace.core.digest import NamedBuffer
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WorkerError
from millrace.core.types import Sampling
from millrace.engines.vllm import loading

pytestmark = pytest.mark.computed

FREE = Sampling(max_tokens=20)


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str) -> None:
    if kind != "vllm":
        pytest.skip("of vLLM alone")


def overwrite(bench: Bench) -> None:
    """Every slot of the ring."""
    for seed in range(3):
        bench.publish(seed)


def test_a_stale_packed_head_is_found_by_the_proof(
    fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_pack_heads_again", lambda model: None)
    bench = fresh_bench("llama tied")
    bench.submit([bench.work(prompt_of(1, 9), FREE)])
    with pytest.raises(DigestMismatchError, match=r"vLLM was given version 0 .* and computes another"):
        bench.serve(1)
    assert bench.engine.version == -1
    assert not bench.engine.has_work and bench.engine.take_progress() == []


def test_what_was_overwritten_since_it_was_staged_leaves_the_served_version(bench_of: OpenBench) -> None:
    bench = bench_of()
    served, staged = bench.serve(1), bench.publish(2)
    bench.engine.stage(staged, bench.reader)
    overwrite(bench)
    with pytest.raises(UnknownVersionError):
        bench.engine.swap(staged)
    assert bench.engine.version == served and bench.engine.digest() == bench.digests[served]
    bench.check(bench.play([bench.work(prompt_of(1, 9), FREE)]))


def test_what_is_overwritten_while_it_is_loaded_is_never_served(
    fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = fresh_bench()
    bench.serve(1)
    staged = bench.publish(2)
    bench.engine.stage(staged, bench.reader)
    as_tensor = loading.as_tensor

    def overtaken(piece: NamedBuffer) -> object:
        if max(bench.models) == staged:
            overwrite(bench)
        return as_tensor(piece)

    monkeypatch.setattr(loading, "as_tensor", overtaken)
    bench.submit([bench.work(prompt_of(1, 9), FREE)])
    with pytest.raises(WorkerError, match=f"half of version {staged}, and must start anew"):
        bench.engine.swap(staged)
    assert bench.engine.version == -1 and not bench.engine.has_work
