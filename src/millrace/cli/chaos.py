"""`millrace chaos`: run a configuration in real processes, attack it, and say whether anything was lost."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from millrace.cli import aftermath
from millrace.cli.aftermath import Check
from millrace.cli.attack import POLL_S, QUIET_S_MAX, SUPERVISION, Attack, Campaign
from millrace.cli.child_run import ROLES, ChildRun
from millrace.cli.options import ConfigFile, Overrides
from millrace.config.load import load
from millrace.core.errors import ConfigError, DeadlineExceeded, MillraceError, WorkerError

console = Console(highlight=False, soft_wrap=True)


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=0, help="Attacks, spread over the steps of the run.")] = 20,
    resume_points: Annotated[
        int, typer.Option(min=0, help="Also kill and resume this many further runs, each at another point.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of who is attacked, how and when.")] = 0,
    run_dir: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/chaos"),
) -> None:
    """Attack a run: kill and freeze its processes at random, then check that nothing was lost."""
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} is not empty: name another --run-dir")
    checks = []
    if kills:
        checks += attack(config_file, run_dir / "run", [*(overrides or ()), *SUPERVISION], kills, seed)
    if resume_points:
        checks += kill_and_resume(config_file, run_dir, list(overrides or ()), resume_points, seed)
    for check in checks:
        console.print(f"{'PASS' if check.holds else 'FAIL'}  {check.claim} ({check.detail})", markup=False)
    raise typer.Exit(0 if all(check.holds for check in checks) else 1)


def attack(config_file: Path, run_dir: Path, overrides: list[str], kills: int, seed: int) -> list[Check]:
    """One run under `kills` attacks."""
    config = load(config_file, overrides)
    memory, started_s = aftermath.shared_memory(), time.monotonic()
    run = ChildRun(config_file, run_dir, overrides)
    campaign = Campaign(run, config.steps, kills, seed, tell=_tell)
    hung = ""
    try:
        campaign.wage()
        orphans = campaign.orphans + run.leftovers()
    except MillraceError as error:
        hung, orphans = str(error), campaign.orphans
    finally:
        run.end()
    console.print(_recoveries(campaign.attacks))
    wall_s = time.monotonic() - started_s
    counts = f"{len(campaign.attacks)} attacks of {kills}, {campaign.sessions} controllers, {wall_s:.0f} s"
    if len(campaign.attacks) < kills:
        counts += "; for all of them it needs more steps"
    ended = Check("the run reached its end", not hung, hung or counts)
    if hung:
        return [ended]
    return [
        ended,
        *aftermath.check_ledger(run.directory.ledger, config),
        aftermath.check_served(run.events),
        *aftermath.check_remains(orphans, memory),
        aftermath.check_sockets(campaign.listening, run.directory.path),
    ]


def kill_and_resume(
    config_file: Path, root: Path, overrides: list[str], points: int, seed: int
) -> list[Check]:
    """The controller killed once in each of `points` runs: the weights must come out bit for bit."""
    if load(config_file, overrides).staleness_bound != 0:
        raise ConfigError(
            "equal weights need a deterministic run: add --set schedule.kind=synchronous, or leave "
            "--resume-points out"
        )
    whole = ChildRun(config_file, root / "undisturbed", overrides)
    _finish(whole)
    expected = _weights(whole)
    rng, different, orphans = random.Random(seed), list[int](), list[int]()
    moments = sorted(rng.sample(range(1, whole.num_events), min(points, whole.num_events - 1)))
    for moment in moments:
        run = ChildRun(config_file, root / f"killed-after-{moment}", overrides)
        orphans += _kill_after(run, moment)
        _finish(run)
        same = _weights(run) == expected
        different += [] if same else [moment]
        console.print(
            f"killed after event {moment} of {whole.num_events}: {'equal' if same else 'DIFFERENT'}"
        )
    detail = f"{len(moments)} points, different at events {different}"
    return [
        Check("resumed weights are bit-equal", not different, detail),
        Check("nothing outlives a killed controller", not orphans, f"left: {orphans[:5]}"),
    ]


def _kill_after(run: ChildRun, num_events: int) -> list[int]:
    """Start it, kill its controller after that many events, and return what was left alive."""
    run.start()
    deadline_s = time.monotonic() + QUIET_S_MAX
    while run.num_events < num_events and run.exit_code is None:
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{run.num_events} events in {QUIET_S_MAX:g} s:\n{run.last_words()}")
        run.poll()
        time.sleep(0.001)
    return run.kill_controller()


def _finish(run: ChildRun) -> None:
    """Start it, or go on with it, to its end."""
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


def _weights(run: ChildRun) -> bytes:
    return (run.directory.model / "model.safetensors").read_bytes()


def _tell(attack: Attack) -> None:
    console.print(f"{attack.act:6} {attack.name} at version {attack.version}", markup=False)


def _recoveries(attacks: list[Attack]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "killed", "paused", "frozen", "recovery s (median)", "(worst)"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role in ROLES:
        mine = [attack for attack in attacks if attack.role == role]
        if mine:
            counts = [str(sum(a.act == act for a in mine)) for act in ("kill", "pause", "freeze")]
            times = [a.recovery_s for a in mine if a.recovery_s is not None]
            shown = [f"{statistics.median(times):.2f}", f"{max(times):.2f}"] if times else ["-", "-"]
            table.add_row(role, *counts, *shown)
    return table
