"""Which keys may change when a run is resumed: keys that do not change what the model learns.

A resumed run equals an uninterrupted run, so keys that the gradient depends on are fixed at the start. Keys
of length, place, speed and observation are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from millrace.config.freeze import recorded
from millrace.config.schema import Config
from millrace.core import clock
from millrace.core.errors import ConfigError
from millrace.run_directory.run_directory import RunDirectory

FREE_ON_RESUME: dict[str, str] = {
    "steps": "how far to go",
    "allow": "what is accepted, not what is done",
    "model.device": "where it computes",
    "model.recompute": "changes speed and memory, never a gradient",
    "trainer.*": "sums in parts: decides rounding only",
    "batch.token_budget": "changes speed and memory, never a gradient",
    "reward.timeout_s": "a limit on reward workers",
    "reward.memory_mb": "a limit on reward workers",
    "reward.workers": "how many reward processes",
    "reward.workers_max": "how many reward processes",
    "reward.*url": "where the judge is",
    "reward.*api_key_env": "which variable has the key of the judge",
    "reward.*concurrency": "a limit on requests to the judge",
    "reward.*requests_per_s": "a limit on requests to the judge",
    "reward.*request_timeout_s": "a deadline",
    "reward.*attempts": "how often the judge is asked for one answer",
    "reward.*backoff_s": "how often the judge is asked for one answer",
    "reward.*asked_twice": "what is measured of the judge, not what is trained",
    "rollout.replicas": "sampling does not depend on which replica samples",
    "rollout.packed": "where replicas run",
    "rollout.colocated": "where replicas run, and when",
    "trainer.standby": "when a trainer is back",
    "rollout.python": "which Python runs the replicas",
    "rollout.servers": "where it generates",
    "rollout.shared_dir": "where servers find weights",
    "rollout.tensor": "a sum in parts: decides rounding only",
    "rollout.native_adapters": "the same adapter beside the weights or in them: decides rounding only",
    "rollout.slots": "what is batched together decides rounding only, and nothing with `rollout.exact`",
    "rollout.prefill_chunk": "speed only",
    "rollout.keep_kv": "speed only",
    "rollout.draft*": "speed only",
    "rollout.exact": "decides rounding only. Without it, tokens sampled from now on may differ in a "
    "repeat of this run",
    "rollout.report_interval_s": "speed only",
    "rollout.probe": "what is looked at before the first trajectory",
    "runtime.*": "where workers run",
    "schedule.repack*": "where trajectories run",
    "weights.*": "how many versions are held",
    "supervision.*": "deadlines and restarts",
    "checkpoints.*": "how often, how many",
    "observe.*": "who watches",
    "evaluations.*.every": "what is measured, not what is trained",
    "evaluations.*.by": "what is made of figures that are recorded",
    "evaluations.*.patience": "when to stop",
    "evaluations.*.keep_best": "which checkpoints are kept",
    "evaluations.*.share": "when it computes",
    "evaluations.*.timeout_s": "a deadline",
}


@dataclass(frozen=True)
class Change:
    """One key that differs. `allowed` is why it may differ; empty: it may not."""

    key: str
    old: Any
    new: Any
    allowed: str


def diff(old: Config, new: Config) -> list[Change]:
    """Every key that differs, in the order of the schema. A date that is not given stays."""
    before, after = dict(flat(recorded(old))), dict(flat(recorded(new)))
    return [
        Change(key, before.get(key, ABSENT), after.get(key, ABSENT), _allowed(key, before, after))
        for key in before | after
        if before.get(key, ABSENT) != after.get(key, ABSENT) and (key, after.get(key)) != ("model.date", None)
    ]


def with_date(config: Config, run: RunDirectory) -> Config:
    """With the date that its chat template writes: the one that the run began with, or today."""
    if config.model.date is not None:
        return config
    begun = run.read_config().model.date if run.config.exists() else None
    today = datetime.fromtimestamp(clock.wall()).date().isoformat()
    model = config.model.model_copy(update={"date": begun or today})
    return config.model_copy(update={"model": model})


def check_resume(old: Config, new: Config) -> list[Change]:
    """The changes, all of them allowed.

    Raises: ConfigError naming each change that is not allowed."""
    changes = diff(old, new)
    refused = [f"  `{c.key}`: {c.old!r} -> {c.new!r}" for c in changes if not c.allowed]
    if refused:
        raise ConfigError(
            "these keys cannot change when a run is resumed:\n"
            + "\n".join(refused)
            + "\n  Put them back, or start a new run (from the exported model of a finished one, if you like)"
        )
    return changes


class _Absent:
    def __repr__(self) -> str:
        return "(not there)"


ABSENT = _Absent()


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values. A table in a list goes by its `name`."""
    for name, value in tree.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {each["name"]: each for each in value}
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _allowed(key: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    if key == "rollout.drafts" and "trained" in (before.get(key), after.get(key)):
        return ""  # versions have the drafter's tensors, or not
    if key == "evaluations" or key.startswith("evaluations."):
        name = ".".join(key.split(".")[:2]) + ".name"
        if (name in before) != (name in after) or key == "evaluations":
            return "what is measured, not what is trained"
    return next((reason for pattern, reason in FREE_ON_RESUME.items() if fnmatchcase(key, pattern)), "")
