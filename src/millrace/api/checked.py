"""Checks a configuration before there is a run directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from millrace.api.configure import PreparedConfig
from millrace.api.helper_process import ask
from millrace.api.messages import info, warn
from millrace.checks.preflight import preflight
from millrace.config.inert import inert
from millrace.run_directory.run_directory import RunDirectory


def check(prepared: PreparedConfig, run_path: Path) -> None:
    """Print warnings. Raises: ConfigError, DataError, RewardError: the run could not begin."""
    for warning in preflight(prepared.config, run_path):
        warn(warning)
    for line in inert(prepared.config):
        info(f"Note: {line}.")
    with tempfile.TemporaryDirectory(prefix="millrace-") as name:
        place = RunDirectory(Path(name).resolve())
        prepared.place(place.path)
        place.write_config(prepared.config)
        for warning in ask("check", {"run": str(place.path)}):
            warn(warning)
