"""Whole runs under attack, one run that is preempted again and again, and checks of the runs afterwards. A
preemption is a SIGTERM and a grace for all processes, or SIGKILL.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from millrace.config.load import load
from millrace.core.errors import ConfigError, DeadlineExceeded, MillraceError, WorkerError
from millrace.observe.terminal import Check
from millrace.run.interrupt import INTERRUPTED
from millrace_chaos import aftermath
from millrace_chaos.attack import (
    BESIDE_VLLM,
    HAND_OVERS,
    MOMENTS,
    POLL_S,
    QUIET_S_MAX,
    SUPERVISION,
    WEIGHTS,
    Attack,
    Campaign,
)
from millrace_chaos.child_run import ChildRun

TURNS = "leased", "finished", "observed"
"""After these events a turn begins, waits for its answer, or is answered, and other turns are under way."""
ACTORS = ["controller", "replica", "reward worker"]
AGENTS = [*ACTORS, "agent"]
EVENTS_OF_A_POINT = 140
"""So many events of turns for each point in one run. An episode that two workers die of fails, and rightly:
more deaths may meet one twice."""


def attack(
    config_file: Path,
    run_dir: Path,
    overrides: list[str],
    kills: int,
    seed: int,
    on_attack: Callable[[Attack], None] = lambda attack: None,
) -> tuple[list[Check], list[Attack]]:
    """Make one run under `kills` attacks. `on_attack` gets each attack."""
    config = load(config_file, overrides)
    memory, started_s = aftermath.shared_memory(), time.monotonic()
    run = ChildRun(config_file, run_dir, overrides)
    moments = HAND_OVERS if config.rollout.colocated else MOMENTS
    weights = BESIDE_VLLM if config.rollout.engine == "vllm" and not config.rollout.stepwise else WEIGHTS
    campaign = Campaign(run, config.steps, kills, seed, on_attack, moments, weights)
    hung = ""
    try:
        campaign.wage()
        orphans = campaign.orphans + run.leftovers()
    except MillraceError as error:
        hung, orphans = str(error), campaign.orphans
    finally:
        run.end()
    wall_s = time.monotonic() - started_s
    several = [size for size in campaign.salvos if size > 1]
    salvos = f"{len(several)} times up to {max(several, default=0)} at once"
    attacks = f"{len(campaign.attacks)} attacks of {kills}"
    counts = f"{attacks}, {salvos}, {campaign.sessions} controllers, {wall_s:.0f} s"
    if len(campaign.attacks) < kills:
        counts += "; for all of them it needs more steps"
    ended = Check("the run reached its end", not hung, hung or counts)
    if hung:
        return [ended], campaign.attacks
    checks = [
        ended,
        *aftermath.check_ledger(run.directory.ledger, config),
        aftermath.check_served(run.events),
        *aftermath.check_remains(orphans, memory),
        aftermath.check_sockets(campaign.listening, run.directory.path),
    ]
    return checks, campaign.attacks


def kill_and_resume(
    config_file: Path,
    root: Path,
    overrides: list[str],
    points: int,
    seed: int,
    report: Callable[[str], None] = lambda text: None,
) -> list[Check]:
    """Kill a process at `points` points, each in a run of its own. The final weights must be equal bit for
    bit.

    The process is the controller, and the run resumes. Where an environment answers turns, it may also be a
    replica, a reward worker or an agent. A point is then in the middle of turns, and a run has several, one
    for `EVENTS_OF_A_POINT`. The engine is exact (`rollout.exact`). If the engine cannot be exact, the first
    run ends with the reason.
    """
    overrides = [*overrides, "rollout.exact=true"]
    config = load(config_file, overrides)
    if config.staleness_bound != 0:
        raise ConfigError(
            "equal weights need a deterministic run: add --set schedule.kind=synchronous, or leave "
            "--resume-points out"
        )
    kinds: tuple[str, ...] = ()
    roles = ["controller"]
    agents: dict[str, str] | None = None
    if config.reward.kind == "environment":
        agents = None if config.reward.agent is None else dict(config.reward.agent.variables)
        kinds, roles = TURNS, ACTORS if agents is None else AGENTS
        overrides += SUPERVISION
    whole = ChildRun(config_file, root / "undisturbed", overrides, agents=agents)
    finish(whole)
    expected, num_events = weights(whole), whole.num_of(kinds)
    each = max(1, num_events // EVENTS_OF_A_POINT) if kinds else 1
    rng, orphans, broken, killed = random.Random(seed), list[int](), list[str](), Counter[str]()
    moments = rng.sample(range(1, num_events), min(points, num_events - 1))
    for first in range(0, len(moments), each):
        at = {moment: rng.choice(roles) for moment in sorted(moments[first : first + each])}
        killed_after = root / f"killed-after-{'-'.join(map(str, at))[:200]}"
        run = ChildRun(config_file, killed_after, overrides, agents=agents)
        orphans += _kill_at(run, kinds, at, killed)
        wrong = [one.claim for one in aftermath.check_ledger(run.directory.ledger, config) if not one.holds]
        wrong += [] if weights(run) == expected else ["different weights"]
        what = ", ".join(f"{role} after {moment}" for moment, role in at.items())
        broken += [f"{what}: {wrong}"] if wrong else []
        report(f"killed {what} of {num_events} events: {', '.join(wrong) or 'equal'}")
    counts = ", ".join(f"{role} {count}" for role, count in killed.items())
    return [
        Check("resumed weights are bit-equal, and accounts close", not broken, f"killed: {counts}; {broken}"),
        Check("nothing outlives a killed controller", not orphans, f"left: {orphans[:5]}"),
    ]


def _kill_at(run: ChildRun, kinds: Sequence[str], at: Mapping[int, str], killed: Counter[str]) -> list[int]:
    """One run from start to end. `at`: after how many events of `kinds` a process of which role is killed.
    Returns the processes that outlived a controller. `killed` counts the roles."""
    run.start()
    orphans = list[int]()
    for moment, role in at.items():
        orphans += _kill_after(run, partial(_has_events, run, kinds, moment), role, moment)
        killed[role] += run.exit_code != 0
    _await_end(run)
    return orphans


def _has_events(run: ChildRun, kinds: Sequence[str], count: int) -> bool:
    return run.num_of(kinds) >= count


def _kill_after(run: ChildRun, has_come: Callable[[], bool], role: str, which: int) -> list[int]:
    """Kill a process of `role` when the moment has come, and resume a run without controller. `which` of the
    processes, counted again and again. Returns the processes that outlive their controller. A run that has
    ended is left alone."""
    deadline_s = time.monotonic() + QUIET_S_MAX
    while not (has_come() and (pids := sorted(run.pids(role).values()))):
        if run.exit_code is not None:
            return []
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{run.num_events} events in {QUIET_S_MAX:g} s:\n{run.last_words()}")
        run.poll()
        time.sleep(0.001)
    return run.kill(role, pids[which % len(pids)])


def finish(run: ChildRun) -> None:
    """Start or resume the run, to its end."""
    run.start()
    _await_end(run)


def _await_end(run: ChildRun) -> None:
    deadline_s = time.monotonic() + QUIET_S_MAX
    while run.exit_code is None:
        if run.poll():
            deadline_s = time.monotonic() + QUIET_S_MAX
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"nothing happened for {QUIET_S_MAX:g} s:\n{run.last_words()}")
        time.sleep(POLL_S)
    run.poll()
    if run.exit_code:
        raise WorkerError(f"the run ended with exit code {run.exit_code}:\n{run.last_words()}")


def weights(run: ChildRun) -> bytes:
    return (run.directory.model / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- preemptions


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
