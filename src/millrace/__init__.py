"""Millrace: asynchronous reinforcement learning for language models.

    import millrace

    run = millrace.train(config, reward=reward, rows=rows)

`python -m pydoc millrace.NAME` explains a name. It is imported when it is first used, and never brings torch
along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.api.callbacks import STOP
    from millrace.api.plain_records import Records, RunComparison
    from millrace.api.questions import evaluate, plan, simulate
    from millrace.api.run import Run, RunCurves
    from millrace.api.sweep import Sweep, sweep
    from millrace.api.train import train
    from millrace.config.schema import Config
    from millrace.core.errors import ConfigError, DataError, MillraceError, RewardError
    from millrace.diagnose.examine import Diagnosis
    from millrace.episodes.environment import Done, Observation
    from millrace.estimates.evaluation import Evaluation

__version__ = "0.1.0"

_HOMES = {
    "train": "millrace.api.train",
    "sweep": "millrace.api.sweep",
    "STOP": "millrace.api.callbacks",
    "evaluate": "millrace.api.questions",
    "simulate": "millrace.api.questions",
    "plan": "millrace.api.questions",
    "Run": "millrace.api.run",
    "Sweep": "millrace.api.sweep",
    "Records": "millrace.api.plain_records",
    "Evaluation": "millrace.estimates.evaluation",
    "Diagnosis": "millrace.diagnose.examine",
    "RunComparison": "millrace.api.plain_records",
    "RunCurves": "millrace.api.run",
    "Config": "millrace.config.schema",
    "Observation": "millrace.episodes.environment",
    "Done": "millrace.episodes.environment",
    "MillraceError": "millrace.core.errors",
    "ConfigError": "millrace.core.errors",
    "DataError": "millrace.core.errors",
    "RewardError": "millrace.core.errors",
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
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
