"""A load into vLLM is proved, whole, or not served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench import Bench, OpenBench, prompt_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.core.digest import NamedBuffer
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WorkerError
from millrace.core.types import Sampling
from millrace.engines.vllm import loading

pytestmark = pytest.mark.computed

FREE = Sampling(max_tokens=20)


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str, stepwise: bool) -> None:
    if kind != "vllm" or not stepwise:
        pytest.skip("of vLLM in this process alone")


def overwrite(bench: Bench) -> None:
    """Every slot of the ring."""
    for seed in range(3):
        bench.publish(seed)


class Reads(TorchDispatchMode):
    """Counts what is read of `num_bytes` of memory at `start`: by copies, and by anything but views."""

    def __init__(self, start: int, num_bytes: int) -> None:
        super().__init__()
        self._start, self._end = start, start + num_bytes
        self.bytes, self.others = 0, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [each for each in tree_leaves((args, kwargs)) if self._is_there(each)]
        if read and func is torch.ops.aten.copy_.default:
            self.bytes += 0 if args[0].is_meta else read[0].nbytes
        elif read and not func.is_view:
            self.others.append(str(func))
        return out

    def _is_there(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
            return False
        return self._start <= value.data_ptr() < self._end


def test_a_stale_packed_head_is_found_by_the_proof(
    fresh_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_pack_again", lambda model: None)
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


def test_a_load_reads_each_byte_of_the_relays_memory_once(
    bench_of: OpenBench,
) -> None:
    """Into its layer: no copy of the version is made on the host."""
    bench = bench_of("llama untied")
    bench.serve(1)
    version = bench.publish(2)
    bench.engine.stage(version, bench.reader)
    with bench.reader.view(version) as (_, buffers):
        num_bytes = sum(len(buffer.data) for buffer in buffers)
        area = bench.reader._memory._area
    with Reads(area.ctypes.data, area.nbytes) as reads:
        bench.engine.swap(version)
    assert reads.bytes == num_bytes
    assert not reads.others
