"""An engine that sleeps has given back its memory, and forgets no token."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from bench import Bench, OpenBench, Played, prompt_of

from millrace.core.types import Sampling, Work
from millrace.rollout.protocol import Capabilities
from millrace.runtime import process

LONG = Sampling(max_tokens=60, ignore_eos=True)
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def _skip_unless_it_sleeps(can: Capabilities) -> None:
    if "rollout.colocated" not in can.settings:
        pytest.skip("this engine cannot sleep")


def works(bench: Bench, count: int = 12) -> list[Work]:
    return [bench.work(prompt_of(i, 5 + i), LONG) for i in range(count)]


def versions(played: Played) -> list[int]:
    return [version for version, _ in played.columns.runs]


def anonymous_bytes() -> int:
    """Of this process and of those that engines have started."""
    pids = [os.getpid(), *process.descendants(os.getpid())]
    status = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in pids]
    return (
        sum(int(kilobytes) for each in status for kilobytes in re.findall(r"RssAnon:\s+(\d+) kB", each))
        * 1024
    )


def test_trajectories_in_flight_go_on_under_the_next_version(bench_of: OpenBench) -> None:
    bench = bench_of()
    before = bench.serve(1)
    bench.submit(works(bench))
    bench.sample(0)
    for _ in range(20):
        bench.step()
    bench.engine.sleep()
    assert bench.engine.version == -1 and not bench.engine.has_work
    bench.take()
    tokens = {i: list(one.tokens) for i, one in bench.played.items()}
    assert any(tokens.values())
    bench.engine.wake()
    after = bench.serve(2)
    played = bench.drain()
    for i, one in played.items():
        assert one.tokens[: len(tokens[i])] == tokens[i]
        assert versions(one) in ([before], [before, after], [after])
    assert any(versions(one) == [before, after] for one in played.values())
    bench.check(played.values())


def test_a_repeated_sleep_and_a_repeated_wake_change_nothing(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    bench.submit(works(bench, 3))
    bench.step()
    bench.engine.sleep()
    bench.engine.sleep()
    assert bench.engine.load().version == -1 and bench.engine.load().kv_used_tokens == 0
    bench.engine.wake()
    bench.engine.wake()
    bench.serve(2)
    bench.check(bench.drain().values())


def test_work_comes_and_goes_while_an_engine_sleeps(bench_of: OpenBench) -> None:
    bench = bench_of()
    bench.serve(1)
    bench.submit(works(bench, 3))
    bench.step()
    bench.engine.sleep()
    bench.submit(works(bench, 3))
    first = min(bench.played)
    bench.release(first)
    bench.engine.wake()
    bench.serve(2)
    played = bench.drain()
    assert len(played) == 5 and all(one.finish is not None for one in played.values())
    bench.check(played.values())


@pytest.mark.computed
def test_a_sleeping_engine_has_given_its_memory_to_the_kernel(fresh_bench: OpenBench) -> None:
    bench = fresh_bench("qwen3 tied", slots=128, max_sequence_tokens=512)
    bench.serve(1)
    bench.play(bench.work(prompt_of(i, 8), Sampling(max_tokens=200, ignore_eos=True)) for i in range(64))
    bench.serve(2)
    awake = anonymous_bytes()
    bench.engine.sleep()
    assert awake - anonymous_bytes() > 20 * MEGABYTE  # keys and values alone
    bench.engine.wake()
    bench.serve(3)
    bench.check(bench.play([bench.work(prompt_of(0, 8), LONG)]))
