"""One run that is preempted again and again. All of its processes get SIGTERM and a grace, or SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from millrace.config.load import load
from millrace.core.errors import DeadlineExceeded, WorkerError
from millrace.observe.terminal import Check
from millrace.run.interrupt import INTERRUPTED
from millrace_chaos import aftermath
from millrace_chaos.attack import POLL_S, QUIET_S_MAX
from millrace_chaos.child_run import ChildRun
from millrace_chaos.trials import finish, weights

ENDS_S_MAX = 10.0
"""A run that was told to end may take so much longer than its grace."""
EVENTS_PER_STEP = 40  # before the run has told how many there are


@dataclass(frozen=True, slots=True)
class Preemption:
    """`version`: the newest before it. `lost`: steps since the checkpoint that is left, which are repeated.
    `steps`: since the controller started."""

    number: signal.Signals
    version: int
    lost: int
    steps: int
    took_s: float
    left: list[int]


def preempt(
    config_file: Path,
    root: Path,
    overrides: list[str],
    count: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
) -> list[Check]:
    """Preempt one run `count` times, spread over its steps. Without staleness its weights must equal those of
    an undisturbed run bit for bit; in any case its accounts are closed."""
    exact = load(config_file, overrides).staleness_bound == 0
    overrides = [*overrides, "rollout.exact=true"] if exact else overrides
    config, memory = load(config_file, overrides), aftermath.shared_memory()
    whole, run = (ChildRun(config_file, root / name, overrides) for name in ("undisturbed", "preempted"))
    if exact:
        finish(whole)
    rng, done = random.Random(seed), list[Preemption]()
    try:
        for index in range(count):
            number, phase = rng.choice((signal.SIGTERM, signal.SIGKILL)), rng.random()
            before = run.counts["step"]
            _run_until(run, index * config.steps // count, phase)
            done.append(one := _preempted(run, number, before, config.supervision.stop_grace_s))
            report(
                f"{one.number.name} at version {one.version}, ended in {one.took_s:.1f} s, "
                f"{one.lost} steps to repeat"
            )
        finish(run)
    finally:
        run.end()
    notices = [one for one in done if one.number == signal.SIGTERM and one.steps]
    kept = sum(one.lost == 0 for one in notices)
    checks = [
        Check(
            "nothing outlives a preempted run", not any(one.left for one in done), f"{len(done)} preemptions"
        ),
        Check("a run that gets SIGTERM saves", kept == len(notices), f"{kept} of {len(notices)} with a step"),
        *aftermath.check_ledger(run.directory.ledger, config),
        *aftermath.check_remains([], memory),
    ]
    if exact:
        same = weights(run) == weights(whole)
        checks.append(Check("weights after preemptions are bit-equal", same, f"{config.steps} steps"))
    return checks


def _run_until(run: ChildRun, version: int, phase: float) -> None:
    """Start or resume the run. Return somewhere in the step after `version`: `phase` says where, 0 to 1."""
    run.start()
    deadline_s, events = time.monotonic() + QUIET_S_MAX, run.num_events
    while run.version < version or run.num_events < events + phase * _events_per_step(run):
        if run.exit_code == 0:
            return
        if run.exit_code is not None:
            raise WorkerError(f"the run ended with exit code {run.exit_code}:\n{run.last_words()}")
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"nothing happened for {QUIET_S_MAX:g} s:\n{run.last_words()}")
        before = run.version
        if run.poll():
            deadline_s = time.monotonic() + QUIET_S_MAX
        if before < version <= run.version:
            events = run.num_events
        time.sleep(POLL_S)


def _events_per_step(run: ChildRun) -> float:
    return run.num_events / run.version if run.version else EVENTS_PER_STEP


def _preempted(run: ChildRun, number: signal.Signals, before: int, grace_s: float) -> Preemption:
    """Send a signal to every process of the run, as when a host is taken away. `before`: steps of earlier
    sessions."""
    run.poll()
    steps, began_s = run.counts["step"] - before, time.monotonic()
    for pid in run.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    while run.exit_code is None:
        if time.monotonic() > began_s + grace_s + ENDS_S_MAX:
            raise DeadlineExceeded(f"{number.name}: no end within {grace_s:g} s:\n{run.last_words()}")
        time.sleep(POLL_S)
    if number == signal.SIGTERM and run.exit_code not in (0, INTERRUPTED, -signal.SIGTERM):
        raise WorkerError(f"SIGTERM ended the run with {run.exit_code}:\n{run.last_words()}")
    took_s, left = time.monotonic() - began_s, run.leftovers()
    run.poll()
    saved = max(run.directory.versions(), default=0)
    return Preemption(number, run.version, run.version - saved, steps, took_s, left)
