"""A step event as flat scalars, under the same names in every service."""

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
    screened = fields.get("groups_screened") or {}
    scalars |= {f"groups/screened_{name}": value for name, value in screened.items()}
    measured = fields.get("reward_metrics") or {}
    scalars |= {f"reward_metrics/{name}": value for name, value in measured.items()}
    chosen = fields.get("selection") or {}
    scalars |= {f"selection/{name}": value for name, value in chosen.items()}
    scalars |= {f"trainer/{name}": value for name, value in (fields.get("metrics") or {}).items()}
    scalars |= {f"accounting/{name}": value for name, value in (fields.get("accounting") or {}).items()}
    return {name: value for name, value in scalars.items() if isinstance(value, int | float)}


def scalars_of(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a step that was not replayed, or of an evaluation. Other events have none."""
    if kind == "step":
        return {} if fields.get("replayed") else step_scalars(fields)
    return evaluation_scalars(fields) if kind == "evaluated" else {}


def evaluation_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Names as `evaluation/<name>/greedy`, `evaluation/<name>/pass_at_4`."""
    metrics = fields["metrics"]
    figures = {
        "greedy": metrics["greedy_accuracy"],
        "sampled": metrics["sampled_accuracy"],
        "reward": metrics["reward_mean"],
    }
    for name in ("pass_at_k", "majority_at_k"):
        figures |= {name.removesuffix("k") + k: value for k, value in metrics[name].items()}
    return {f"evaluation/{fields['name']}/{k}": value for k, value in figures.items() if value is not None}
