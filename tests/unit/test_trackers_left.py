"""A tracker that hangs at the end of a run keeps neither its process nor the other trackers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from observe_events import step

from millrace.config.tables.operation import Observe
from millrace.core.events import Event, Events
from millrace.observe.sinks import open_sinks
from millrace.run.interrupt import INTERRUPTED

HANGS = """
import asyncio, atexit, json, os, signal, sys, threading
from pathlib import Path
from millrace.run.interrupt import run_stoppable
from millrace.config.tables.operation import Observe
from millrace.core.events import Events
from millrace.observe.sinks import trackers
from millrace.observe.sinks import open_sinks

class Hangs:
    def close(self):
        os.kill(os.getpid(), AT_CLOSE)
        threading.Event().wait()

open_sinks._trackers = lambda *_: {"hangs": Hangs}

async def body(stop):
    async with open_sinks.open_sinks(Events(lambda: 0, lambda: 0), Observe(), Path(sys.argv[1]), {}):
        os.kill(os.getpid(), AT_START)
        await asyncio.sleep(0)

def train(*_):
    run_stoppable(body, print, grace_s=60)
    return 3
"""


def run_to_its_end(directory: Path, program: str) -> subprocess.CompletedProcess[bytes]:
    arguments = [sys.executable, "-c", program, str(directory)]
    return subprocess.run(
        arguments, capture_output=True, timeout=120, check=False, input=b'{"work": "train"}\n'
    )


def test_the_second_signal_ends_a_process_that_waits_for_a_tracker(tmp_path: Path) -> None:
    program = (
        "import signal; AT_START = AT_CLOSE = signal.SIGINT" + HANGS + "trackers.CLOSE_S = 600\ntrain()\n"
    )
    assert run_to_its_end(tmp_path, program).returncode == INTERRUPTED


class Meets:
    """A tracker whose end waits for that of the other one."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def log_sample(self, event: Event) -> None: ...

    def log_scalars(self, event: Event, scalars: object) -> None: ...

    def close(self) -> None:
        self._both.wait(60)


def test_after_an_error_all_trackers_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, warned, both = Events(lambda: 0.0, lambda: 0.0), list[Event](), threading.Barrier(2)
    monkeypatch.setattr(
        open_sinks, "_trackers", lambda *_: dict.fromkeys(("one", "two"), lambda: Meets(both))
    )

    async def run() -> None:
        async with open_sinks.open_sinks(events, Observe(), tmp_path, {}):
            events.subscribe(lambda event: warned.append(event) if event.kind == "warned" else None)
            events.emit("step", **step(1.0, 1).fields)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())
    assert warned == []


ATEXIT = """
def begin(stand_in):
    atexit.register(threading.Event().wait)  # as that of W&B, which joins its service
    print("last words", end="")
    stand_in()
"""
COMMAND = "from millrace.cli import app\napp.run = train\nbegin(app.main)\n"
BUG = "from millrace.cli import app\ndef bug(_): train(); 1 / 0\napp.run = bug\nbegin(app.main)\n"
WORK = "from millrace.api import work\nwork.WORKS['train'] = train\nbegin(work.main)\n"


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [(COMMAND, 3, b"last words"), (BUG, 1, b"ZeroDivisionError"), (WORK, 0, b'{"result": 3}')],
    ids=["command", "bug", "work"],
)
def test_a_process_ends_though_a_library_of_a_tracker_waits_at_its_exit(
    tmp_path: Path, way: str, code: int, said: bytes
) -> None:
    program = "AT_START = AT_CLOSE = 0" + HANGS + "trackers.CLOSE_S = 0.01\n" + ATEXIT + way
    done = run_to_its_end(tmp_path, program)
    assert done.returncode == code and said in done.stdout + done.stderr
