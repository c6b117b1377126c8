"""What the core takes from the packages beside it, by name.

The core imports none of them. It asks here, at the moment of need. No command waits for what it leaves out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millrace.core.errors import ConfigError

TARGETS: dict[str, str] = {
    "sim.SimulatedConfig": "millrace_sim.config:SimulatedConfig",
    "sim.PlanConfig": "millrace_sim.config:PlanConfig",
    "sim.simulate": "millrace_sim.compare:compared_records",
    "sim.plan": "millrace_sim.plan.planned:planned_record",
    "sweeps.sweep": "millrace_sweeps.run_sweep:sweep",
    "sweeps.counts": "millrace_sweeps.run_sweep:counts_of",
    "sweeps.trials": "millrace_sweeps.run_sweep:trials_of",
    "sweeps.ranking": "millrace_sweeps.run_sweep:ranking_of",
    "ui.simulated": "millrace_ui.simulated:simulated",
    "ui.speed_of": "millrace_ui.speed.speed_answer:speed_of",
    "ui.curated": "millrace_ui.curated:write_page",
}
"""What the core asks for, with its module and its name there."""


def wing(name: str) -> Any:
    """The object `name` of `TARGETS`, imported now. Raises: ConfigError: its package is not installed."""
    module, _, attribute = TARGETS[name].partition(":")
    package = module.partition(".")[0]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"`{name}` needs the package `{package}`, which is not installed.\n"
            "  It is a part of Millrace: install Millrace again, whole"
        ) from None
