"""What a joiner raises, whatever that is and whenever it does, is told and never ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import Millrace
from millrace.controller.fleet import live_reward_workers
from millrace.controller.replica_session import ReplicaSession
from millrace.core import errors
from millrace.core.errors import (
    ClusterError,
    ConfigError,
    LedgerError,
    MillraceError,
    TornVersionError,
    UnknownVersionError,
    WorkerError,
)
from millrace.core.types import Report
from millrace.runtime.seam import crossing
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Outcome, Scaling, Scenario, simulate
from millrace_sim.virtual.faults import Crash, Faults
from millrace_sim.virtual.workers import SimulatedWorker
from tests.long import few


def tree(root: type[MillraceError]) -> Iterator[type[MillraceError]]:
    if root.__module__ == errors.__name__:
        yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


CLASSES: list[type[Exception]] = [*dict.fromkeys(tree(MillraceError)), ValueError, OSError, AssertionError]
SLOW = Costs(step_base_s=0.2, score_s=0.3)
MOMENTS = [
    ("replica-1", "start"),
    ("replica-1", "pull"),
    ("replica-1", "submit"),
    ("replica-1", "reports"),
    ("relay-host-1", "start"),
    ("relay-host-1", "open"),
    ("relay-host-1", "fetch"),
    ("reward-worker-1", "start"),
    ("reward-worker-1", "score"),
]

CASES = [
    *((ClusterError, *moment) for moment in MOMENTS),
    *((kind, *MOMENTS[num % len(MOMENTS)]) for num, kind in enumerate(CLASSES)),
    *((kind, *moment) for kind in (UnknownVersionError, ValueError) for moment in MOMENTS),
]


class Raises:
    """A role that raises in one of its methods, and is as it was in the others."""

    def __init__(self, role: Any, moment: str, error: Exception) -> None:
        self._role, self._moment, self._error = role, moment, error

    def __getattr__(self, name: str) -> Any:
        if name != self._moment:
            return getattr(self._role, name)
        return {"reports": self._reports, "score": self._score}.get(name, self._call)

    async def _call(self, *args: Any) -> Any:
        raise self._error

    async def _score(self, requests: Any) -> Any:
        raise self._error
        yield

    async def _reports(self) -> Any:
        async for report in self._role.reports():
            if report.progress:
                raise self._error
            yield report


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have workers that are named so raise `error` at this moment, from this time on."""

    def begin(names: str, moment: str, error: Exception, from_s: float = 0.0) -> None:
        honest = SimulatedWorker.start

        async def start(worker: SimulatedWorker, target: str, kwargs: Any, timeout_s: float) -> None:
            await honest(worker, target, kwargs, timeout_s)
            if not worker.name.startswith(names) or worker._loop.time() < from_s:
                return
            if moment == "start":
                raise crossing(error, f"{worker.name}: start") from None
            worker._instance = Raises(worker._instance, moment, error)

        monkeypatch.setattr(SimulatedWorker, "start", start)

    return begin


def run(steps: int = 40, replicas: int = 1, hosts: int = 1, **world: Any) -> Outcome:
    limits = Supervision(restarts=2, backoff_s=0.05)
    config = small_config(Millrace(), steps=steps, replicas=replicas, supervision=limits)
    reward = config.reward.model_copy(update={"workers": 1, "workers_max": 3})
    config = config.model_copy(update={"reward": reward})
    return simulate(Scenario(config, costs=SLOW, hosts=hosts, later_hosts=1, **world))


def troubles(outcome: Outcome) -> str:
    kinds = ("scaled", "warned", "worker_died", "fetch_missed", "ended")
    return "\n".join(str(event.fields) for event in outcome.events if event.kind in kinds)


@pytest.mark.parametrize(("kind", "name", "moment"), few(CASES, len(MOMENTS)))
def test_no_joiner_ends_a_run(
    kind: type[Exception], name: str, moment: str, raising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_reward_workers, "DRAIN_S", 0.001)  # so that further reward workers start
    raising(name, moment, kind("it is not as it was there"))
    outcome = run(scalings=(Scaling(2.0, 3),))
    assert len(outcome.of("step")) == 40
    answers = moment == "pull" and kind in (UnknownVersionError, TornVersionError)  # "overwritten meanwhile"
    if not answers:
        assert "it is not as it was there" in troubles(outcome)


def test_a_wrong_setting_ends_a_run_at_its_start_at_once(raising: Any) -> None:
    for name, moment in (("replica-0", "start"), ("relay", "open"), ("reward-worker-0", "start")):
        raising(name, moment, ConfigError("no CUDA here"))
        with pytest.raises(ConfigError, match="no CUDA here"):
            run(replicas=2, time_max_s=5.0)


@pytest.mark.parametrize("kind", few([ConfigError, ValueError, errors.DataError, errors.StorageError], 2))
@pytest.mark.parametrize("name", few(["replica-1", "reward-worker-0", "relay-host-1"]))
def test_one_of_several_that_cannot_start_again_is_given_up(
    kind: type[Exception], name: str, raising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_reward_workers, "DRAIN_S", 0.001)
    raising(name, "start", kind("no CUDA any more"), from_s=5.0)
    outcome = run(steps=120, replicas=2, hosts=2, faults=Faults(crashes=(Crash(name, 5.0),)))
    assert len(outcome.of("step")) == 120 and len(outcome.of("worker_died")) <= 4
    assert f"{name} died 3 times" in troubles(outcome) and "no CUDA any more" in troubles(outcome)


def test_the_last_one_that_cannot_start_again_ends_the_run(raising: Any) -> None:
    raising("replica-0", "start", ConfigError("no CUDA any more"), from_s=5.0)
    with pytest.raises(WorkerError, match=r"replica-0 died 3 times .*no CUDA any more"):
        run(steps=120, faults=Faults(crashes=(Crash("replica-0", 5.0),)))


@pytest.mark.parametrize("kind", [AssertionError, KeyError, LedgerError, ClusterError])
def test_the_controllers_own_errors_end_a_run_whoever_joins(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ReplicaSession._take_in

    def take_in(session: ReplicaSession, report: Report) -> None:
        if session.name == "replica-1":
            raise kind("a bug")
        honest(session, report)

    monkeypatch.setattr(ReplicaSession, "_take_in", take_in)
    with pytest.raises(kind, match="a bug"):
        run(scalings=(Scaling(2.0, 2),))
