"""Events of a small run, for tests of the sinks."""

from __future__ import annotations

from typing import Any

from millrace.core.events import Event

BALANCE = {
    "admitted": 8, "trained": 4, "rejected": 1, "stale": 1, "abandoned": 0, "failed": 0, "in_flight": 2,
}  # fmt: skip


def event(kind: str, at_s: float, **fields: Any) -> Event:
    return Event(kind, at_s, 1000.0 + at_s, fields)


def run_started(at_s: float = 0.0, resumed_version: int = 0) -> Event:
    return event(
        "run_started",
        at_s,
        steps=4,
        schedule="laminar",
        group_size=2,
        batch_groups=2,
        replicas=["replica-0", "replica-1"],
        resumed_version=resumed_version,
    )


def step(at_s: float, version: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "version": version,
        "reward_mean": version / 10,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "staleness_histogram": {0: 50, 1: 50},
        "lengths": {"groups": 2, "mean": 25.0, "std": 5.0},
        "window": {"batches": 16, "staleness_mean": 0.25, "fairness": 0.75, "next": -0.5},
        "groups_ready": 3,
        "trained_tokens": 100,
        "step_s": 1.0,
        "wait_s": 0.5,
        "replayed": False,
        "logprob_gap": {0: [0.001, 0.01, 50], 1: [0.1, 1.0, 50]},
        "metrics": {"loss": 0.25, "lr": 1e-3},
        "accounting": BALANCE,
    }
    return event("step", at_s, **(fields | changes))


def report(at_s: float, replica: str, generated_tokens: int, busy_s: float, idle_s: float) -> Event:
    return event(
        "report",
        at_s,
        replica=replica,
        version=1,
        running=3,
        waiting=2,
        kv_used_tokens=50,
        kv_capacity_tokens=200,
        generated_tokens=generated_tokens,
        busy_s=busy_s,
        idle_s=idle_s,
    )


def worker_started(at_s: float, name: str, epoch: int = 1) -> Event:
    return event("worker_started", at_s, role="replica", name=name, epoch=epoch, spawn_s=0.2)


def worker_died(at_s: float, name: str) -> Event:
    return event("worker_died", at_s, role="replica", name=name, epoch=1, cause="killed by signal 9")


def worker_recovered(at_s: float, name: str) -> Event:
    return event("worker_recovered", at_s, role="replica", name=name, epoch=2, recovery_s=0.75)


def published(at_s: float, version: int, stall_s: float) -> Event:
    return event("published", at_s, version=version, digest="d", stall_s=stall_s, weights_bytes=1000)


def moved(at_s: float) -> Event:
    trajectories = [1, 2, 3]
    return event(
        "moved", at_s, source="replica-0", destination="replica-1", trajectories=trajectories, version=1
    )


def pulled(at_s: float, replica: str) -> Event:
    return event("pulled", at_s, replica=replica, version=1, digest="d", pull_s=0.5, swap_s=0.01, in_flight=3)


def run_ended(at_s: float, ok: bool = True) -> Event:
    return event("run_ended", at_s, ok=ok, reason="done", took_s=at_s, accounting=BALANCE)


def sample(at_s: float, version: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "version": version,
        "place": "best",
        "trajectory_id": 7,
        "row_id": "row-7",
        "state": "trained",
        "reason": "",
        "reward": 1.0,
        "finish": "stop",
        "num_tokens": 2,
        "trained_version": version,
        "versions": [version - 1],
        "prompt": "1+1=",
        "completion": "2",
    }
    return event("sample", at_s, **(fields | changes))
