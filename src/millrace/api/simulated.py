"""Simulates a configuration, or the next run after a real run, for the command line and the API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.config.schema import Config
from millrace.config.tables.schedules import Schedule
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError
from millrace_sim.calibrate.learn import calibrate
from millrace_sim.config import SimulatedConfig
from millrace_sim.report.compare import Comparison, OnProgress, compare, schedules
from millrace_sim.setup import check_memory, scenario
from millrace_sim.simulation import Scenario


def base_scenario(config: Section | None, run: Path | None, seed: int | None) -> Scenario:
    """The scenario of `config`. With `run`, its lengths and costs, and by default its configuration."""
    if run is not None:
        calibration = calibrate(run)
        next_run = config if isinstance(config, Config) else calibration.config
        return calibration.scenario(next_run, seed=next_run.seed if seed is None else seed)
    if not isinstance(config, SimulatedConfig):
        raise ConfigError(
            "name a configuration, or a run to take lengths and costs from: --from RUN, in Python run=RUN"
        )
    check_memory(config)
    return scenario(config, seed=seed)


def compared(
    base: Scenario,
    names: Sequence[str],
    *,
    seeds: int,
    jobs: int,
    on_progress: OnProgress = lambda progress: None,
) -> list[Comparison]:
    """The named presets, or the configuration's own schedule, on the same seeds."""
    own: dict[str, Schedule] = {base.config.schedule.kind: base.config.schedule}
    return compare(base, schedules(names) if names else own, seeds=seeds, jobs=jobs, on_progress=on_progress)


def records(comparisons: Sequence[Comparison], first_seed: int) -> list[dict[str, Any]]:
    """A flat record per schedule and seed."""
    return [
        {"schedule": comparison.name, "seed": first_seed + index, **result.as_dict()}
        for comparison in comparisons
        for index, result in enumerate(comparison.results)
    ]
