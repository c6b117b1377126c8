"""vLLM with its model divided among two processes: what one of them does wrong, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from bench import Bench, OpenBench, prompt_of

from millrace.core.errors import DigestMismatchError, TornVersionError, UnknownVersionError, WorkerError
from millrace.core.types import Sampling
from millrace.engines.vllm import loading
from millrace.runtime import process
from millrace.runtime.local.local_runtime import LocalRuntime

LONG = Sampling(max_tokens=200, ignore_eos=True)
DEADLINE_S = 300.0


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str, stepwise: bool) -> None:
    if kind != "vllm" or not stepwise:
        pytest.skip("of vLLM in this process alone")


@pytest.fixture
def bench(bench_of: OpenBench) -> Bench:
    """A load that failed is no reason for a new one: the next load takes all tensors."""
    return bench_of("llama tied", tensor=2)


@pytest.fixture
def doomed_bench(fresh_bench: OpenBench) -> Bench:
    return fresh_bench("llama tied", tensor=2)


def ranks(pid: int) -> list[int]:
    """vLLM's processes below `pid`, in order of their rank."""
    titles = {child: Path(f"/proc/{child}/cmdline").read_text() for child in process.descendants(pid)}
    return sorted((child for child in titles if "Worker_TP" in titles[child]), key=titles.__getitem__)


def shared_memory(pid: int) -> set[Path]:
    """Files of it that `pid` has mapped, by name. One whose name is gone is called otherwise."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {Path(name) for name in mapped if name.startswith("/dev/shm/")}


def own_ranks(bench: Bench) -> list[int]:
    return [process.pid for process in bench.engine._ranks._processes]  # type: ignore[attr-defined]


def until(claim: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + DEADLINE_S
    while not claim() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return claim()


def in_rank(rank: int, fail: Callable[[], Exception]) -> Callable[..., list[Exception]]:
    """As `load_version`, but in `rank` it is `fail` that says how it went. Travels by value."""
    whole = loading.load_version

    def load_version(worker: Any, reader: Any, version: int, digest: str) -> list[Exception]:
        if worker.rank != rank:
            return whole(worker, reader, version, digest)
        return [fail()]

    return load_version


# ---------------------------------------------------------------- loads


def test_each_process_has_a_part_of_the_weights(bench: Bench) -> None:
    def elements(worker: Any) -> int:
        return sum(parameter.numel() for parameter in worker.model_runner.get_model().parameters())

    bench.serve(1)
    counted = bench.engine._llm.collective_rpc(elements)  # type: ignore[attr-defined]
    whole = sum(parameter.numel() for parameter in next(iter(bench.models.values())).parameters())
    assert counted[0] == counted[1] and sum(counted) < 1.1 * whole


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stale_packed_head_in_one_process_is_found_by_the_proof(rank: int, bench: Bench) -> None:
    whole = loading.load_version

    def load_version(worker: Any, reader: Any, version: int, digest: str) -> list[Exception]:
        pack = (lambda model: None) if worker.rank == rank else loading._pack_heads_again
        with patch.object(loading, "_pack_heads_again", pack):
            return whole(worker, reader, version, digest)

    bench.serve(1)
    with (
        patch("millrace.engines.vllm.vllm_engine.load_version", load_version),
        pytest.raises(DigestMismatchError, match=r"vLLM was given version \d+ .* and computes another"),
    ):
        bench.serve(3 + rank)
    assert bench.engine.version == -1


@pytest.mark.parametrize("error", [TornVersionError, UnknownVersionError])
def test_a_version_that_only_one_process_could_load_is_never_served(
    error: type[Exception], bench: Bench
) -> None:
    bench.serve(1)
    staged = bench.publish(2)
    bench.engine.stage(staged, bench.reader)
    bench.submit([bench.work(prompt_of(1, 9), LONG)])
    with (
        patch("millrace.engines.vllm.vllm_engine.load_version", in_rank(1, lambda: error("overwritten"))),
        pytest.raises(WorkerError, match=f"half of version {staged}, and must start anew: overwritten"),
    ):
        bench.engine.swap(staged)
    assert bench.engine.version == -1 and not bench.engine.has_work


# ---------------------------------------------------------------- ends


def test_a_process_that_is_killed_in_a_step_ends_the_step_and_the_other(doomed_bench: Bench) -> None:
    bench = doomed_bench
    bench.serve(1)
    pids = own_ranks(bench)
    bench.submit(bench.work(prompt_of(i, 9), LONG) for i in range(4))
    bench.sample(3)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"pid {pids[1]}\) was killed by signal 9 \(SIGKILL\)"):
        bench.drain()
    assert until(lambda: not {*pids} & {*ranks(os.getpid())})


def test_a_process_that_is_killed_while_it_waits_for_work_is_told_by_the_next_load(
    doomed_bench: Bench,
) -> None:
    bench = doomed_bench
    bench.serve(1)
    pid = own_ranks(bench)[0]
    os.kill(pid, signal.SIGKILL)

    def told() -> bool:
        try:
            bench.engine.load()
        except WorkerError as error:
            return f"pid {pid}" in str(error)
        return False

    assert until(told)


def test_a_killed_replica_leaves_no_process_and_no_shared_memory(warm: None, bench: Bench) -> None:
    version = bench.publish(1)
    kwargs = {
        "name": "r0",
        "engine": "vllm",
        "options": bench.options,
        "report_interval_s": 0.02,
        "open_reader": "millrace.weights.ring:open_reader",
    }

    async def scenario() -> set[Path]:
        runtime = LocalRuntime()
        try:
            async with asyncio.timeout(DEADLINE_S):
                target = "millrace.rollout.replica:EngineReplica"
                replica = await runtime.spawn("r0", target, kwargs, timeout_s=DEADLINE_S)
                await replica.call("pull", version, bench.endpoint, timeout_s=DEADLINE_S)
                await replica.call("submit", [bench.work(prompt_of(1, 9), LONG)], timeout_s=DEADLINE_S)
                async for report in replica.stream("reports"):
                    if report.progress:
                        break
                found = process.descendants(replica.pid)
                assert len(ranks(replica.pid)) == 2
                shared = set().union(*map(shared_memory, [replica.pid, *found]))
                replica.kill()
                await replica.dead
                assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found))
        finally:
            await runtime.close()
        return shared

    assert not any(path.exists() for path in asyncio.run(scenario()))
