"""vLLM in a process of its own: what a load in the middle, a release and a kill do to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bench import Bench, OpenBench, Played, prompt_of

from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import UnknownVersionError, WorkerError
from millrace.core.types import Sampling
from millrace.runtime import process

pytestmark = pytest.mark.computed

ENDLESS = Sampling(max_tokens=220, ignore_eos=True)
SCRIPT = ((1, 6), (2, 25), (3, 30))
"""Weights, and the tokens that a completion has when the next are loaded."""
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _only_of_async_vllm(kind: str, stepwise: bool) -> None:
    if kind != "vllm" or stepwise:
        pytest.skip("of vLLM in a process of its own alone")


def play_script(bench: Bench) -> list[TokenColumns]:
    """Four trajectories, each resumed under each of the versions."""
    columns = [TokenColumns() for _ in range(4)]
    for lease, (seed, tokens) in enumerate(SCRIPT):
        bench.serve(seed)
        works = [
            bench.work(
                prompt_of(i, 20), Sampling(max_tokens=tokens, ignore_eos=True), trajectory_id=1000 + i,
                lease=lease, tokens=columns[i].tokens,
            )
            for i in range(4)
        ]  # fmt: skip
        for column, one in zip(columns, bench.play(works), strict=True):
            bench.check([one])
            column.extend(one.columns)
    return columns


def test_tokens_and_versions_are_those_of_the_engine_in_this_process(fresh_bench: OpenBench) -> None:
    mine, theirs = (play_script(fresh_bench(stepwise=stepwise)) for stepwise in (False, True))
    for one, other in zip(mine, theirs, strict=True):
        assert one.versions() == other.versions() == [0] * 6 + [1] * 19 + [2] * 5
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_load_keeps_running_requests_and_its_versions_are_exact(
    recompute: bool, bench_of: OpenBench
) -> None:
    """At the end of each request the engine compares its versions with vLLM's own."""
    bench = bench_of(recompute=recompute)
    versions = [bench.serve(1), bench.publish(2), bench.publish(3)]
    bench.engine.stage(versions[1], bench.reader)
    works = [bench.work(prompt_of(i, 20), ENDLESS, group_id=i) for i in range(4)]
    bench.submit(works)
    aborted = watch(bench, "abort")
    for version, tokens in zip(versions[1:], (5, 60), strict=True):
        bench.sample(tokens)
        bench.engine.swap(version)
        if version == versions[1]:
            bench.engine.stage(versions[2], bench.reader)
    played = list(bench.drain().values())
    assert not aborted
    for one in played:
        assert [version for version, _ in one.columns.runs] == versions
        assert len(one.tokens) == ENDLESS.max_tokens
    bench.check(played if recompute else [before(one, versions[1]) for one in played])


def before(one: Played, version: int) -> Played:
    """What was sampled before `version`: after that the cache has keys and values of several."""
    return Played(one.work, one.columns[: one.columns.versions().index(version)])


def watch(bench: Bench, method: str) -> list[tuple[Any, ...]]:
    """The calls of that method of `AsyncLLM` from now on."""
    calls: list[tuple[Any, ...]] = []
    llm = bench.engine._frontend.llm  # type: ignore[attr-defined]
    whole = getattr(llm, method)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return await whole(*args, **kwargs)

    setattr(llm, method, watched)
    return calls


def test_a_prefix_is_shared_within_a_version_and_never_across(bench_of: OpenBench) -> None:
    bench, prompt = bench_of(recompute=False), prompt_of(5, 100)

    def prefilled() -> int:
        before = bench.engine.load().prefilled_tokens
        bench.check(bench.play([bench.work(prompt, Sampling(max_tokens=4))]))
        return bench.engine.load().prefilled_tokens - before

    for seed in (1, 2, 1):
        bench.serve(seed)
        assert prefilled() == 100
        assert prefilled() <= 100 - 64


def test_what_is_released_is_taken_out_alone(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    works = [bench.work(prompt_of(i, 20), ENDLESS) for i in range(4)]
    bench.submit(works)
    aborted = watch(bench, "abort")
    bench.sample(5)
    released = bench.release(works[2].trajectory_id)
    assert len(aborted) == 1 and 5 <= len(released.tokens) < 220
    rest = list(bench.drain().values())
    assert len(rest) == 3 and all(len(one.tokens) == 220 for one in rest) and len(aborted) == 1
    again = bench.work(
        works[2].prompt, ENDLESS, trajectory_id=works[2].trajectory_id, lease=1, tokens=released.tokens
    )
    (resumed,) = bench.play([again])
    assert len(released.tokens) + len(resumed.tokens) == 220
    bench.check([released, *rest, resumed])


def test_a_version_that_was_overwritten_leaves_the_served_one(bench_of: OpenBench) -> None:
    bench = bench_of()
    served, staged = bench.serve(1), bench.publish(2)
    bench.engine.stage(staged, bench.reader)
    for seed in range(3):
        bench.publish(seed)
    bench.submit([bench.work(prompt_of(1, 9), ENDLESS)])
    bench.sample(3)
    with pytest.raises(UnknownVersionError):
        bench.engine.swap(staged)
    (one,) = bench.drain().values()
    assert bench.engine.version == served and one.columns.runs == [(served, 220)]
    bench.check([one])


# ---------------------------------------------------------------- without seeds


def test_without_seeds_log_probs_are_right_and_nothing_repeats(bench_of: OpenBench) -> None:
    bench = bench_of(seeded=False)
    bench.serve(1)
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    played = [
        one
        for lease in range(2)
        for one in bench.play(
            bench.work([5, 6, 7], sampling, trajectory_id=2000 + i, lease=lease) for i in range(2)
        )
    ]
    assert len({tuple(one.tokens) for one in played}) == 4
    bench.check(played)
    assert "a resumed trajectory samples anew" in bench.engine.computes


# ---------------------------------------------------------------- ends


@pytest.fixture
def doomed(fresh_bench: OpenBench) -> Iterator[tuple[Bench, int]]:
    bench = fresh_bench()
    bench.serve(1)
    yield bench, bench.engine._frontend._process.pid  # type: ignore[attr-defined]
    bench.engine.version = -1  # what is left there is nobody's
    bench.played.clear()


def test_a_kill_of_vllms_process_in_mid_generation_is_told(doomed: tuple[Bench, int]) -> None:
    bench, pid = doomed
    bench.submit(bench.work(prompt_of(i, 9), ENDLESS) for i in range(4))
    bench.sample(3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by signal 9 \(SIGKILL\)"):
        bench.drain()


def test_a_kill_of_vllms_process_while_it_waits_for_work_is_told_by_a_load(
    doomed: tuple[Bench, int],
) -> None:
    bench, pid = doomed
    os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + DEADLINE_S
    with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by signal 9"):
        while time.monotonic() < end_s:
            bench.engine.load()
            time.sleep(0.01)


def test_a_close_ends_even_a_process_that_does_not_answer(doomed: tuple[Bench, int]) -> None:
    bench, pid = doomed
    os.kill(pid, signal.SIGSTOP)
    bench.close()
    assert pid not in process.children(os.getpid())
