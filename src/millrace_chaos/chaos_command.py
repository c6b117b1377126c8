"""`millrace chaos`: run a configuration in real processes, attack it, and say whether anything was lost."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from millrace.cli.options import ConfigFile, Overrides
from millrace.core.errors import ConfigError
from millrace.observe.terminal import Terminal, print_checks
from millrace.runtime.process import check_kernel
from millrace_chaos.attack import SUPERVISION, Attack
from millrace_chaos.child_run import ROLES
from millrace_chaos.hostile import try_hostile
from millrace_chaos.sessions import AttackedRun, Sessions, summarize
from millrace_chaos.trials import attack, kill_and_resume, preempt

console = Terminal(soft_wrap=True)


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=0, help="Attacks, spread over the steps of the run.")] = 20,
    resume_points: Annotated[
        int, typer.Option(min=0, help="Also kill and resume this many further runs, each at another point.")
    ] = 0,
    preemptions: Annotated[
        int,
        typer.Option(min=0, help="Preempt one further run this often: SIGTERM or SIGKILL to all of it."),
    ] = 0,
    tamperings: Annotated[
        int,
        typer.Option(min=0, help="Change files of this many further runs, between two sessions."),
    ] = 0,
    hostile: Annotated[
        int, typer.Option(min=0, help="Make this many further runs with hostile rows and rewards.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of who is attacked, how and when.")] = 0,
    run_dir: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/chaos"),
) -> None:
    """Attack a run: kill and freeze its processes at random, then check that nothing was lost."""
    check_kernel()
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} is not empty: name another --run-dir")
    checks = []
    if kills:
        hardened = [*(overrides or ()), *SUPERVISION]
        campaign_checks, attacks = attack(config_file, run_dir / "run", hardened, kills, seed, _print_attack)
        console.print(_recoveries(attacks))
        checks += campaign_checks
    if resume_points:
        checks += kill_and_resume(
            config_file, run_dir, list(overrides or ()), resume_points, seed, console.print
        )
    own = list(overrides or ())
    if preemptions:
        checks += preempt(config_file, run_dir, own, preemptions, seed, console.print)
    if tamperings:
        sessions = Sessions(config_file, _made(run_dir / "tampered"), own, seed, _print_attacked_run)
        checks += summarize(sessions.try_all(tamperings))
    if hostile:
        attacked = try_hostile(
            config_file, _made(run_dir / "hostile"), own, hostile, seed, _print_attacked_run
        )
        checks += summarize(attacked)
    raise typer.Exit(0 if print_checks(console, checks) else 1)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory.resolve()


def _print_attacked_run(run: AttackedRun) -> None:
    wrong = f"  WRONG: {run.problem}" if run.problem else ""
    console.print(f"{run.kind}: {run.changed}: {run.end}{wrong}")


def _print_attack(attack: Attack) -> None:
    console.print(f"{attack.act:6} {attack.name} at version {attack.version}")


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
