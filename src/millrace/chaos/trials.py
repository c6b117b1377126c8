"""Whole runs under attack, and checks of the runs afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from millrace.chaos import aftermath
from millrace.chaos.attack import (
    BESIDE_VLLM,
    HAND_OVERS,
    MOMENTS,
    POLL_S,
    QUIET_S_MAX,
    WEIGHTS,
    Attack,
    Campaign,
)
from millrace.chaos.child_run import ChildRun
from millrace.config.load import load
from millrace.core.errors import ConfigError, DeadlineExceeded, MillraceError, WorkerError
from millrace.observe.check import Check


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
    """Kill the controller once in each of `points` runs. The final weights must be equal bit for bit.

    The engine is exact (`rollout.exact`). If the engine cannot be exact, the first run ends with the reason.
    """
    overrides = [*overrides, "rollout.exact=true"]
    if load(config_file, overrides).staleness_bound != 0:
        raise ConfigError(
            "equal weights need a deterministic run: add --set schedule.kind=synchronous, or leave "
            "--resume-points out"
        )
    whole = ChildRun(config_file, root / "undisturbed", overrides)
    finish(whole)
    expected = weights(whole)
    rng, different, orphans = random.Random(seed), list[int](), list[int]()
    moments = sorted(rng.sample(range(1, whole.num_events), min(points, whole.num_events - 1)))
    for moment in moments:
        run = ChildRun(config_file, root / f"killed-after-{moment}", overrides)
        orphans += _kill_after(run, moment)
        finish(run)
        same = weights(run) == expected
        different += [] if same else [moment]
        report(f"killed after event {moment} of {whole.num_events}: {'equal' if same else 'DIFFERENT'}")
    detail = f"{len(moments)} points, different at events {different}"
    return [
        Check("resumed weights are bit-equal", not different, detail),
        Check("nothing outlives a killed controller", not orphans, f"left: {orphans[:5]}"),
    ]


def _kill_after(run: ChildRun, num_events: int) -> list[int]:
    """Start the run, kill its controller after `num_events` events, and return the processes that are
    left."""
    run.start()
    deadline_s = time.monotonic() + QUIET_S_MAX
    while run.num_events < num_events and run.exit_code is None:
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{run.num_events} events in {QUIET_S_MAX:g} s:\n{run.last_words()}")
        run.poll()
        time.sleep(0.001)
    return run.kill_controller()


def finish(run: ChildRun) -> None:
    """Start or resume the run, to its end."""
    run.start()
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
