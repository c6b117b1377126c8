"""What a worker says of itself counts the processes that it has started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from millrace.runtime import process
from millrace.runtime.vitals import VitalSigns

MIB = 1 << 20
WITHIN_S = 60.0
# A child that starts a child of its own, which takes 64 MiB and computes until it is killed.
BUSY = "held = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: sum(range(1000))"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


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


def test_descendants_are_children_and_theirs(family: subprocess.Popen[str]) -> None:
    (grandchild,) = process.children(family.pid)
    assert process.descendants(family.pid) == [grandchild]
    assert process.has_children()
