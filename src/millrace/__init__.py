"""Millrace: asynchronous reinforcement learning for language models.

    import millrace

    run = millrace.train(config, reward=reward, rows=rows)

Every public name is in docs/api.md. A name is imported when it is first used, and never brings torch along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.api.callbacks import STOP
    from millrace.api.questions import evaluate, plan, simulate
    from millrace.api.records import Records
    from millrace.api.run import Run
    from millrace.api.train import train
    from millrace.config.schema import Config
    from millrace.core.errors import ConfigError, DataError, MillraceError, RewardError
    from millrace.environments.turns.environment import Done, Observation
    from millrace.estimates.evaluation import Evaluation
    from millrace.look.curves.run_curves import RunCurves
    from millrace.look.diagnosis import Diagnosis
    from millrace.look.side_by_side import RunComparison
    from millrace.sweeps.sweep import Sweep, sweep

__version__ = "0.1.0"

_HOMES = {
    "train": "api.train",
    "sweep": "sweeps.sweep",
    "STOP": "api.callbacks",
    "evaluate": "api.questions",
    "simulate": "api.questions",
    "plan": "api.questions",
    "Run": "api.run",
    "Sweep": "sweeps.sweep",
    "Records": "api.records",
    "Evaluation": "estimates.evaluation",
    "Diagnosis": "look.diagnosis",
    "RunComparison": "look.side_by_side",
    "RunCurves": "look.curves.run_curves",
    "Config": "config.schema",
    "Observation": "environments.turns.environment",
    "Done": "environments.turns.environment",
    "MillraceError": "core.errors",
    "ConfigError": "core.errors",
    "DataError": "core.errors",
    "RewardError": "core.errors",
}

__all__ = [
    "STOP",
    "Config",
    "ConfigError",
    "DataError",
    "Diagnosis",
    "Done",
    "Evaluation",
    "MillraceError",
    "Observation",
    "Records",
    "RewardError",
    "Run",
    "RunComparison",
    "RunCurves",
    "Sweep",
    "evaluate",
    "plan",
    "simulate",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = getattr(import_module(f"millrace.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
