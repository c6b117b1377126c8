"""`millrace sft`: a supervised warm start, so that reinforcement learning has something to reinforce."""

from __future__ import annotations

from pathlib import Path

import typer

from millrace.cli.options import ConfigFile, Overrides
from millrace.config.load import load_as
from millrace.core.errors import ConfigError
from millrace.observe.terminal import Terminal
from millrace.sft.sft_config import SupervisedConfig
from millrace.sft.warm_start import warm_start


def command(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Train a model on demonstrations (prompt and completion)."""
    config = load_as(SupervisedConfig, config_file, overrides or ())
    out = Path(config.model.out)
    if out.exists():
        raise ConfigError(f"`model.out` ({out}) exists already.\n  Name another, or remove it")
    console = Terminal(stderr=True, soft_wrap=True)
    warm_start(config, lambda text: console.print(text))
    typer.echo(f"Saved in {out}")
