"""A step event as flat scalars: the one set of names that every metrics sink uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "reward_mean": "reward/mean",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "trained_tokens": "tokens/trained",
    "step_s": "time/step_s",
    "wait_s": "time/wait_s",
    "groups_ready": "groups/ready",
}
_WINDOW = {"staleness_mean": "window/staleness", "fairness": "window/fairness", "next": "window/next"}


def step_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Names as `reward/mean`, `reward_metrics/<name>`, `trainer/<metric>`,
    `logprob_gap/<staleness>/mean`, `accounting/<state>`."""
    scalars = {name: fields[key] for key, name in _NAMES.items() if key in fields}
    window = fields.get("window") or {}
    scalars |= {name: window[key] for key, name in _WINDOW.items() if key in window}
    for staleness, (mean, largest, _tokens) in (fields.get("logprob_gap") or {}).items():
        scalars[f"logprob_gap/{staleness}/mean"] = mean
        scalars[f"logprob_gap/{staleness}/max"] = largest
    measured = fields.get("reward_metrics") or {}
    scalars |= {f"reward_metrics/{name}": value for name, value in measured.items()}
    scalars |= {f"trainer/{name}": value for name, value in (fields.get("metrics") or {}).items()}
    scalars |= {f"accounting/{name}": value for name, value in (fields.get("accounting") or {}).items()}
    return {name: value for name, value in scalars.items() if isinstance(value, int | float)}
