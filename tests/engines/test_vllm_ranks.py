"""vLLM with its model divided among two processes: what one of them does wrong, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, OpenBench, prompt_of
from rank_faults import Fault, FaultyReader, Together, killed, stale, torn, unknown

from millrace.core.errors import DigestMismatchError, WorkerError
from millrace.core.types import Sampling
from millrace.runtime import process
from millrace.runtime.local.local_runtime import LocalRuntime

LONG = Sampling(max_tokens=200, ignore_eos=True)
DEADLINE_S = 300.0
Doomed = tuple[Bench, list[int]]


@pytest.fixture(autouse=True)
def _only_of_vllm(kind: str) -> None:
    if kind != "vllm":
        pytest.skip("of vLLM alone")


@pytest.fixture
def asynchronous(stepwise: bool) -> None:
    if stepwise:
        pytest.skip("tried with vLLM in a process of its own")


@pytest.fixture
def bench(bench_of: OpenBench) -> Bench:
    """A load that failed is no reason for a new one: the next load takes all tensors."""
    return bench_of(tensor=2)


@pytest.fixture
def doomed(fresh_bench: OpenBench) -> Iterator[Doomed]:
    """A bench that serves, and its ranks."""
    others = ranks(os.getpid())
    bench = fresh_bench(tensor=2)
    bench.serve(1)
    yield bench, [pid for pid in ranks(os.getpid()) if pid not in others]
    bench.engine.version = -1  # what is left there is nobody's
    bench.played.clear()


def ranks(pid: int) -> list[int]:
    """vLLM's processes below `pid`, in order of their rank."""
    titles = {child: Path(f"/proc/{child}/cmdline").read_text() for child in process.descendants(pid)}
    return sorted((child for child in titles if "Worker_TP" in titles[child]), key=titles.__getitem__)


def shared_memory(pid: int) -> set[Path]:
    """Files of it that `pid` has mapped, by name. One whose name is gone is called otherwise."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {Path(name) for name in mapped if name.startswith("/dev/shm/")}


def until(claim: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + DEADLINE_S
    while not claim() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return claim()


# ---------------------------------------------------------------- loads


@pytest.mark.stepwise
def test_each_process_has_a_part_of_the_weights(bench: Bench) -> None:
    def elements(worker: Any) -> int:
        return sum(parameter.numel() for parameter in worker.model_runner.get_model().parameters())

    bench.serve(1)
    counted = bench.engine._llm.collective_rpc(elements)  # type: ignore[attr-defined]
    whole = sum(parameter.numel() for parameter in next(iter(bench.models.values())).parameters())
    assert counted[0] == counted[1] and sum(counted) < 1.1 * whole


def load(bench: Bench, seed: int, rank: int, fault: Fault) -> int:
    """Load the weights of `seed` through a reader with that fault."""
    version = bench.publish(seed)
    bench.engine.stage(version, FaultyReader(bench.reader, rank, fault))
    bench.engine.swap(version)
    return version


def test_the_ranks_load_at_the_same_time(bench: Bench, tmp_path: Path) -> None:
    bench.serve(1)
    version = load(bench, 2, -1, Together(tmp_path))
    (one,) = bench.play([bench.work(prompt_of(1, 9), Sampling(max_tokens=5))])
    assert one.columns.runs[0][0] == version
    bench.check([one])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stale_part_in_one_process_is_found_by_the_proof(rank: int, bench: Bench) -> None:
    bench.serve(1)
    with pytest.raises(DigestMismatchError, match=r"vLLM was given version \d+ .* and computes another"):
        load(bench, 2, rank, stale)
    assert bench.engine.version == -1


@pytest.mark.parametrize("fault", [torn, unknown])
def test_a_version_that_only_one_process_could_load_is_never_served(fault: Fault, bench: Bench) -> None:
    bench.serve(1)
    bench.submit([bench.work(prompt_of(1, 9), LONG)])
    with pytest.raises(WorkerError, match=r"half of version \d+, and must start anew: overwritten"):
        load(bench, 2, 1, fault)
    assert bench.engine.version == -1 and not bench.engine.has_work


# ---------------------------------------------------------------- ends


def running(bench: Bench) -> None:
    bench.submit(bench.work(prompt_of(i, 9), LONG) for i in range(4))
    bench.sample(3)


def all_ended(pids: list[int]) -> bool:
    """Zombies count as ended."""
    return all(process.stat_fields(pid)[:1] in ([], ["Z"]) for pid in pids)


def test_a_rank_that_is_killed_in_a_step_ends_the_step_and_the_other(doomed: Doomed) -> None:
    bench, pids = doomed
    running(bench)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"VllmWorker-1 \(pid {pids[1]}\) was killed by signal 9"):
        bench.drain()
    assert until(lambda: all_ended(pids))


@pytest.mark.usefixtures("asynchronous")
def test_a_rank_that_is_killed_while_the_engine_sleeps_is_told_by_the_next_load(doomed: Doomed) -> None:
    bench, pids = doomed
    bench.engine.sleep()
    os.kill(pids[0], signal.SIGKILL)

    def load_fails() -> bool:
        try:
            bench.engine.load()
        except WorkerError as error:
            return f"VllmWorker-0 (pid {pids[0]}) was killed" in str(error)
        return False

    assert until(load_fails) and until(lambda: all_ended(pids))


@pytest.mark.usefixtures("asynchronous")
def test_a_rank_that_is_killed_while_it_loads_ends_the_load(doomed: Doomed) -> None:
    bench, pids = doomed
    running(bench)
    with pytest.raises(WorkerError, match=rf"VllmWorker-1 \(pid {pids[1]}\) was killed by signal 9"):
        load(bench, 2, 1, killed)
    assert until(lambda: all_ended(pids))


@pytest.mark.usefixtures("asynchronous")
def test_vllms_own_process_takes_its_ranks_with_it(doomed: Doomed) -> None:
    bench, pids = doomed
    running(bench)
    core = process.parents()[pids[0]]
    os.kill(core, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"EngineCore.* \(pid {core}\) was killed by signal 9"):
        bench.drain()
    assert until(lambda: all_ended(pids))


@pytest.mark.usefixtures("asynchronous")
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
