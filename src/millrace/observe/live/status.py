"""The state of a run from its latest events, for the live view. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from millrace.core.events import Event
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.replica_times import ReplicaTotals
from millrace.observe.summary import Speeds

_STALLED, _STARTING = "stalled", "still starting"
_INTERRUPTED = "interrupted"
_WINDOW_STEPS = 20  # for idling and the time left


class Status:
    """A sink. Idling and the time left are of the last steps. A value that is not known yet is None."""

    def __init__(self) -> None:
        self.schedule = ""
        self.steps_total = 0
        self.version = 0
        self.rewards: deque[float] = deque(maxlen=200)  # mean of each step
        self.staleness_mean: float | None = None
        self.staleness_max = 0
        self.fairness: float | None = None  # of the last batches
        self.in_flight = 0
        self.metrics: dict[str, float] = {}  # of the last step, as the trainer named them
        self.num_scores = self.num_failed = 0  # rewards since the start or resume, and those that failed
        self.resident_bytes: dict[str, int] = {}  # by process
        self.available_bytes: int | None = None  # of the host
        self.sample: dict[str, Any] | None = None
        self.restarts = 0
        self.last_trouble = ""
        self.findings: dict[str, str] = {}  # present findings of the doctor, by fault
        self.ended: str | None = None
        self.started_wall_s = self.wall_s = 0.0
        self.ready: dict[str, None] = {}  # workers that are up, in the order of their start
        self.computes: dict[str, str] = {}  # by worker
        self.replicas = ReplicaTotals()
        self.speeds = Speeds()
        self.stepped = False  # whether a step was made or replayed since the start
        self.environment = EnvironmentUse()
        self.episodes: dict[str, int] = {}  # open, and closed by cause, at the last step
        self._group_size = 0
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW_STEPS)  # wall, wait, step

    def __call__(self, event: Event) -> None:
        self.wall_s = event.wall_s
        self.replicas(event)
        self.speeds(event)
        self.environment(event)
        fields = event.fields
        self._watch(event.kind, fields)
        match event.kind:
            case "run_started":
                self.schedule, self.steps_total = fields["schedule"], fields["steps"]
                self.version, self.started_wall_s = fields["resumed_version"], event.wall_s
                self._group_size = fields["group_size"]
            case "admitted":
                self.in_flight += len(fields["group_ids"]) * self._group_size
                self._forget(_STARTING)
            case "step":
                self._step(event, fields)
                self.episodes = fields.get("episodes", self.episodes)
            case "computes":
                self.computes[fields["name"]] = fields["computes"]
            case "starting":
                self.last_trouble = f"{_STARTING}: {'; '.join(fields['waits'])}"
            case "finding":
                self.findings[fields["fault"]] = f"doctor: {fields['fault']}: {fields['evidence'][0]}"
            case "withdrawn":
                self.findings.pop(fields["fault"], None)
                self.last_trouble = f"doctor: {fields['reason']}"
            case "stalled" | "step_rejected" | "replay_differs" | "warned":
                self.last_trouble = _trouble(event.kind, fields)
            case "run_ended":
                expected = fields["ok"] or fields["reason"].startswith(_INTERRUPTED)
                self.ended = fields["reason"] if expected else "by an error"

    def _watch(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "scored":
                self.num_scores += 1
                self.num_failed += fields["outcome"] == "failed"
            case "memory":
                self.resident_bytes = fields["resident_bytes"]
                self.available_bytes = fields["available_bytes"]
            case "worker_started":
                self.ready[fields["name"]] = None
            case "worker_died":
                self.restarts += 1
                self.ready.pop(fields["name"], None)
                cause = fields["cause"].partition("\n")[0]
                named = cause.startswith(fields["name"])
                self.last_trouble = cause if named else f"{fields['name']} died: {cause}"
            case "worker_recovered":
                self.last_trouble = f"{fields['name']} is back after {fields['recovery_s']:.2f} s"
            case "sample" if self.sample is None or self.sample["version"] != fields["version"]:
                self.sample = fields  # the best of its group comes first

    def _step(self, event: Event, fields: dict[str, Any]) -> None:
        self.version = fields["version"]
        self.staleness_mean, self.staleness_max = fields["staleness_mean"], fields["staleness_max"]
        self.fairness = (fields.get("window") or {}).get("fairness")
        self.in_flight = fields["accounting"]["in_flight"]
        self.metrics = fields["metrics"]
        self._forget(_STALLED, _STARTING)
        if not fields["replayed"]:
            self.rewards.append(fields["reward_mean"])
            self._steps.append((event.wall_s, fields["wait_s"], fields["step_s"]))
        self.stepped = True

    def _forget(self, *troubles: str) -> None:
        if self.last_trouble.startswith(troubles):
            self.last_trouble = ""

    @property
    def scoring(self) -> int:
        """Finished trajectories whose reward is not known yet, and turns without an answer."""
        return self.environment.num_waiting

    @property
    def trainer_idle_fraction(self) -> float | None:
        """The share of time in which the trainer waited for batches, over the last steps."""
        if len(self._steps) < 2:
            return None
        total_s = self._steps[-1][0] - self._steps[0][0]
        return min(1.0, sum(wait for _, wait, _ in list(self._steps)[1:]) / total_s) if total_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """The time left at the pace of the last steps. The step under way counts as if it ended now."""
        if len(self._steps) < 2:
            return None
        first_s, last_s, num = self._steps[0][0], self._steps[-1][0], len(self._steps)
        pace_s = max((last_s - first_s) / (num - 1), (self.wall_s - first_s) / num)
        return pace_s * max(0, self.steps_total - self.version)


def _trouble(kind: str, fields: dict[str, Any]) -> str:
    if kind == "stalled":
        return f"{_STALLED}: {'; '.join(fields['waits'])}"
    if kind == "warned":
        return f"{fields['source']}: {fields['reason']}"
    if kind == "step_rejected":
        return f"batch rejected at {fields['reason'].partition(';')[0]}"
    return f"version {fields['version']} is not bit for bit what it was: {fields['reason']}"
