"""`millrace scale`: changes the number of replicas while the run goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.options import Run
from millrace.observe.terminal import Terminal
from millrace.run import scaling
from millrace.run_directory import run_directory


def command(
    run: Run,
    replicas: Annotated[
        int, typer.Option(min=0, max=scaling.REPLICAS_MAX, help="How many there shall be. 0: the run waits.")
    ],
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait until it is done.")
    ] = scaling.TIMEOUT_S,
) -> None:
    """Let replicas join or leave a running run, and wait until they have. Nothing is lost: those that leave
    give their trajectories to others."""
    console, directory = Terminal(soft_wrap=True), run_directory.find(run)
    scaling.scale(directory, replicas, timeout_s=timeout, report=console.print)
    if replicas == 0:
        console.print("The run has no replica and waits. To go on: --replicas N")
    else:
        console.print(
            f"{replicas} replica{'' if replicas == 1 else 's'} serve{'s' if replicas == 1 else ''}."
        )
