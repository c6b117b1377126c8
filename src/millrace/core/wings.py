"""What the core takes from the packages beside it, by name.

The core imports none of them. It asks here, at the moment of need. No command waits for what it leaves out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.extras import in_words

TARGETS = {
    "jax.convert": "millrace_jax.files.convert:convert",
    "jax.export_adapter": "millrace_jax.files.model_directory:export_adapter",
    "jax.export_checkpoint": "millrace_jax.files.model_directory:export_checkpoint",
    "jax.traced_values": "millrace_jax.traced_values:traced_values",
    "jax.trainer": "millrace_jax.role:JaxTrainer",
    "ray.check_cluster": "millrace_ray.cluster_check:check_cluster",
    "ray.connect": "millrace_ray.cluster:connect",
    "ray.hosts": "millrace_ray.ray_hosts:ray_hosts",
    "ray.present": "millrace_ray.ray_hosts:present",
    "ray.runtime": "millrace_ray.ray_runtime:RayRuntime",
    "sandbox": "millrace_sandbox.sandbox:Sandbox",
    "sandbox.reward": "millrace_sandbox.code_reward:CodeReward",
    "sim.SimulatedConfig": "millrace_sim.config:SimulatedConfig",
    "sim.PlanConfig": "millrace_sim.config:PlanConfig",
    "sim.simulate": "millrace_sim.compare:compared_records",
    "sim.plan": "millrace_sim.plan.planned:planned_record",
    "sweeps.SweepConfig": "millrace_sweeps.sweep_config:SweepConfig",
    "sweeps.sweep": "millrace_sweeps.run_sweep:sweep",
    "sweeps.counts": "millrace_sweeps.run_sweep:counts_of",
    "sweeps.trials": "millrace_sweeps.run_sweep:trials_of",
    "sweeps.ranking": "millrace_sweeps.run_sweep:ranking_of",
    "ui.simulated": "millrace_ui.simulated:simulated",
    "ui.curated": "millrace_ui.curated:write_page",
    "ui.drawing": "millrace_ui.notebook:GrowingCurves",
    "ui.html": "millrace_ui.notebook:html",
    "ui.report": "millrace_ui.run_report:report_runs",
    "ui.side_by_side": "millrace_ui.side_by_side:side_by_side",
    "ui.speed_of": "millrace_ui.speed_answer:speed_of",
    "ui.tables": "millrace_ui.side_by_side:tables",
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
            raise in_words(error) from None
        raise ConfigError(
            f"`{name}` needs the package `{package}`, which is not installed.\n"
            "  It is a part of Millrace: install Millrace again, whole"
        ) from None
