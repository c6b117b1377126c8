"""What a worker says of itself counts the processes that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace.runtime import process
from millrace.runtime.vitals import VitalSigns

MIB = 1 << 20
WITHIN_S = 60.0
# A child that starts a child of its own, which takes 64 MiB and computes until it is killed.
BUSY = "held = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: sum(range(1000))"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"

# A child whose second thread computes or waits for a lock, on one core, while its first thread waits for it.
THREADS = """
import os, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(int(sys.argv[2]))
lock = threading.Lock()
lock.acquire()
def compute():
    while True: sum(range(1000))
second = threading.Thread(target=compute if sys.argv[3] == "compute" else lock.acquire)
second.start()
print("ready", flush=True)
second.join()
"""
LOWEST = 19


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        yield parent
        for pid in [*process.descendants(parent.pid), parent.pid]:
            process.kill(pid)


def until(claim: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return claim()


def test_a_busy_grandchild_counts_as_work_and_its_memory_as_size(family: subprocess.Popen[str]) -> None:
    signs = VitalSigns()
    own_s = time.process_time()
    before = signs.take([], receiving=False)
    assert until(
        lambda: signs.take([], receiving=False).cpu_s > before.cpu_s + 0.5 + time.process_time() - own_s
    )
    with_family = signs.take([], receiving=False).resident_bytes
    for pid in [*process.descendants(family.pid), family.pid]:
        process.kill(pid)
    family.wait(WITHIN_S)
    assert with_family - signs.take([], receiving=False).resident_bytes > 64 * MIB


def test_what_an_ended_child_computed_is_not_forgotten() -> None:
    signs = VitalSigns()
    before_s = signs.take([], receiving=False).cpu_s
    own_s = time.process_time()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert signs.take([], receiving=False).cpu_s - before_s - (time.process_time() - own_s) > 0.29


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel tells no run-queue time")
def test_a_thread_that_gets_no_core_waits_in_the_run_queue_and_one_that_waits_for_a_lock_does_not() -> None:
    core = str(min(os.sched_getaffinity(0)))
    signs = VitalSigns()

    def child(nice: int, does: str) -> int:
        command = [sys.executable, "-c", THREADS, core, str(nice), does]
        started = children.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        children.callback(started.kill)
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        return started.pid

    def sleeps(pid: int) -> bool:
        return {process.stat_fields(f"{pid}/task/{thread}")[0] for thread in process.threads(pid)} == {"S"}

    with ExitStack() as children:
        starved, stuck = child(LOWEST, "compute"), child(0, "wait")
        for _ in range(2):
            child(0, "compute")
        assert until(lambda: sleeps(stuck))
        before_s, stuck_s = process.queued_s(starved), process.queued_s(stuck)
        assert until(lambda: process.queued_s(starved) > before_s + 0.5)
        assert process.queued_s(stuck) == stuck_s
        assert signs.take([], receiving=False).queued_s > before_s + 0.5
    assert process.queued_s(starved) == 0.0


def test_descendants_are_children_and_theirs(family: subprocess.Popen[str]) -> None:
    (grandchild,) = process.children(family.pid)
    assert process.descendants(family.pid) == [grandchild]
    assert process.has_children()
