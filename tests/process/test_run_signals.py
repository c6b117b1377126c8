"""Signals to a whole run: what a scheduler, a terminal that closes and a curious person send."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.commands.test_cli_commands import wait_for_steps
from tests.long import long

from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace.run.interrupt import INTERRUPTED
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.process import descendants

WAIT_S = 200


def begun(start: Path, run: RunDirectory, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(run.path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}  # an unread terminal is soon full
    more = ["--set", "steps=100000", "--set", "checkpoints.every=100000"]
    process = subprocess.Popen([*command, *more], text=True, env=environment, **how)
    wait_for_steps(run, process)
    return process


def nothing_is_lost(run: RunDirectory) -> None:
    with LedgerReader(run.ledger) as reader:
        overview = reader.overview()
    assert overview.checkpoint is not None and overview.checkpoint.version == overview.version > 0
    assert overview.accounting.balanced and not overview.accounting.failed
    assert not [event for event in read_events(run.events) if event.kind == "worker_died"]


def started(run: RunDirectory) -> set[str]:
    return {event.fields["name"] for event in read_events(run.events) if event.kind == "worker_started"}


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_one_signal_shows_every_stack_and_another_to_every_process_saves(start: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    process = begun(start, run, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    until(lambda: {"trainer", "replica-0", "replica-1"} <= started(run))  # none answers before that
    process.send_signal(signal.SIGUSR1)
    stacks = run.logs / "controller.stacks"
    until(lambda: stacks.exists() and "-- task" in stacks.read_text())
    logs = [path for path in run.logs.glob("*.log") if path.name.startswith(("trainer", "replica"))]
    until(lambda: all("-- task" in path.read_text() for path in logs))
    assert len(logs) >= 2 and process.poll() is None
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGUSR2)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == INTERRUPTED, said
    assert "To go on" in said
    nothing_is_lost(run)


@long
def test_a_terminal_that_closes_ends_a_run_after_its_step(start: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every write to the terminal fails from then on."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run = RunDirectory(tmp_path / "run")
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = begun(start, run, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(theirs)
    os.close(ours)
    assert process.wait(WAIT_S) == INTERRUPTED
    nothing_is_lost(run)
