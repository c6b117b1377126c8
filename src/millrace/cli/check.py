"""`millrace check`: says whether a run would start, here or on its cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from millrace.checks.cluster_facts import CheckedCluster
from millrace.checks.preflight import preflight
from millrace.cli.options import AsJson, ConfigFile, Overrides, print_json
from millrace.config.inert import inert
from millrace.config.load import load
from millrace.config.tables.operation import RayCluster
from millrace.core.errors import ConfigError
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal
from millrace.placement.assign import size
from millrace.run.going_on import checkable

RUN_DIR = "Where the run is to be."


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    run_dir: Annotated[Path, typer.Option(help=RUN_DIR)] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Ask every node of the cluster, measure its links, and say what would fail. Exit code 2 if that is
    anything."""
    config = checkable(load(config_file, overrides or ()))
    checked = CheckedCluster([], [], [], [])
    if isinstance(config.runtime, RayCluster):
        checked = wing("ray.check_cluster")(config, config.runtime, run_dir)
    if not as_json:
        _print(checked)
    if checked.problems and not as_json:
        raise ConfigError("\n".join(checked.problems))
    notes, warnings = inert(config), list(checked.warnings)
    if not checked.problems:
        warnings += preflight(config, run_dir)
    if as_json:
        tree = msgspec.to_builtins(msgspec.structs.replace(checked, warnings=warnings)) | {"inert": notes}
        print_json(tree)
        raise typer.Exit(2 if checked.problems else 0)
    console = Terminal(soft_wrap=True)
    for warning in warnings:
        console.print(f"Warning: {warning}.", style="yellow")
    for note in notes:
        console.print(f"Note: {note}.")
    console.print("Ready.", style="green")


def _print(checked: CheckedCluster) -> None:
    console = Terminal(soft_wrap=True)
    if checked.nodes:
        nodes = Table("node", "cores", "memory free", "GPUs", "disk free", "clock", box=None, pad_edge=False)
        for one in checked.nodes:
            free = (size(one.free_bytes), str(one.gpus), size(one.disk_bytes), f"{one.clock_s:+.1f} s")
            nodes.add_row(one.name, str(one.cores), *free)
        console.print(nodes)
    if checked.links:
        links = Table("link", "carries", "connects in", box=None, pad_edge=False)
        for link in checked.links:
            rate = f"{size(link.bytes_per_s)}/s"
            links.add_row(f"{link.source} -> {link.target}", rate, f"{link.connect_s * 1000:.1f} ms")
        console.print(links)
