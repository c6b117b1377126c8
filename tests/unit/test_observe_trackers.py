"""What trackers get of a run; `make test-trackers` has their real packages."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from observe_events import event, run_started, sample, step

from millrace.config.tables.operation import Observe
from millrace.core.events import Event, Events
from millrace.observe.sinks import trackers
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.observe.sinks.trackers import (
    MlflowTracker,
    Tracked,
    Tracker,
    TrackioTracker,
    WandbTracker,
    end_all,
)


class Package:
    """Stands in for a tracker's package: every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.TRACKIO_DIR = Path()

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **named: Any) -> Package:
            self.calls.append((name, *values, named))
            return self

        return call

    def search_runs(self, **_: Any) -> list[Package]:
        return []


class Kept:
    """A tracker: the versions that it got. It fails at `fails`, and waits for `waits` before it opens."""

    closed = False

    def __init__(self, *, fails: int = 0, waits: threading.Event | None = None) -> None:
        if waits is not None:
            waits.wait(60)
        self.fails, self.versions = fails, []

    def log_sample(self, event: Event) -> None:
        self.versions.append(event.fields["version"])

    def log_scalars(self, event: Event, scalars: Any) -> None:
        if event.fields["version"] == self.fails:
            raise OSError("no space\nleft")
        self.versions.append(event.fields["version"])

    def close(self) -> None:
        self.closed = True


def opened(name: str, directory: Path) -> Tracker:
    match name:
        case "wandb":
            return WandbTracker("project", directory, "id", {})
        case "mlflow":
            return MlflowTracker("experiment", "name", "id", {})
    return TrackioTracker("project", "id", {})


@pytest.mark.parametrize(("name", "called"), [("wandb", "log"), ("mlflow", "log_text"), ("trackio", "log")])
def test_a_tracker_gets_samples_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, called: str
) -> None:
    package = Package()
    monkeypatch.setitem(sys.modules, name, package)
    opened(name, tmp_path).log_sample(sample(1.0, 3, prompt="1+1=", completion="2"))
    calls = [call for call in package.calls if call[0] == called]
    assert len(calls) == 1 and "best" in str(calls)
    assert "1+1=" in str(package.calls)


@contextmanager
def sink_of(tracker: Any) -> Iterator[tuple[Tracked, list[Event]]]:
    events, warned = Events(lambda: 0.0, lambda: 0.0), []
    sink = Tracked(events, "a tracker", tracker)
    events.subscribe(lambda event: warned.append(event.fields["reason"]))
    yield sink, warned


def end(sink: Tracked) -> None:
    asyncio.run(end_all([sink]))
    sink.close()


def test_steps_and_samples_arrive_in_order_and_replays_are_left_out() -> None:
    tracker = Kept()
    with sink_of(lambda: tracker) as (sink, warned):
        for one in (run_started(), step(1.0, 1), sample(1.0, 1), step(2.0, 2, replayed=True), step(3.0, 3)):
            sink(one)
        end(sink)
    assert tracker.versions == [1, 1, 3] and warned == []


def test_a_tracker_that_fails_once_gets_the_rest_and_the_run_is_told_once() -> None:
    tracker = Kept(fails=2)
    with sink_of(lambda: tracker) as (sink, warned):
        for version in (1, 2, 2, 3):
            sink(step(1.0, version))
        end(sink)
    assert tracker.versions == [1, 3]
    assert warned == ["it did not get all of version 2, the run goes on: OSError: no space left"]


def test_a_tracker_that_cannot_be_opened_is_told_once() -> None:
    def fails() -> Tracker:
        raise SystemExit("log in first")

    with sink_of(fails) as (sink, warned):
        end(sink)
        sink(step(1.0, 1))
    assert warned == ["it gets nothing until the run is resumed, the run goes on: SystemExit: log in first"]


def test_a_tracker_that_hangs_delays_no_step_and_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    never = threading.Event()
    with sink_of(lambda: Kept(waits=never)) as (sink, warned):
        for version in range(1, trackers.QUEUED_MAX + 2):
            sink(step(1.0, version))
        assert warned == ["it does not keep up: 1000 steps and samples wait, one was left out"]
        end(sink)
        never.set()
        sink.done.result(60)
    assert len(warned) == 1


def test_a_tracker_with_a_full_queue_gets_the_whole_queue_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "QUEUED_MAX", 3)
    waits, opened = threading.Event(), list[Kept]()

    def opens() -> Tracker:
        opened.append(Kept(waits=waits))
        return opened[0]

    with sink_of(opens) as (sink, _):
        for version in range(1, 6):
            sink(step(1.0, version))
        sink.end()
        waits.set()
        sink.done.result(10)
    assert opened[0].versions == [1, 2, 3] and opened[0].closed


def test_a_tracker_that_is_not_done_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    never = threading.Event()
    with sink_of(lambda: Kept(waits=never)) as (sink, warned):
        end(sink)
        never.set()
        sink.done.result(60)
    assert warned == ["it was not done at the end of the run, and got 0.01 s more at most"]


def test_a_run_whose_tracker_cannot_be_written_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no directory")
    events, warned = Events(lambda: 0.0, lambda: 0.0), []

    async def run() -> None:
        async with open_sinks(events, Observe(), tmp_path, {}):
            events.subscribe(lambda event: warned.append(event) if event.kind == "warned" else None)
            events.emit("step", **step(1.0, 1).fields)

    asyncio.run(run())
    assert [(event.fields["source"], "exists" in event.fields["reason"]) for event in warned] == [
        ("tensorboard", True)
    ]


def test_an_evaluation_that_comes_late_has_a_version_of_its_own_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package()
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = WandbTracker("project", tmp_path, "id", {})
    tracker.log_scalars(step(1.0, 5), {"reward/mean": 0.5})
    tracker.log_scalars(event("evaluated", 2.0, version=4), {"evaluation/a/greedy": 0.1})
    logged = [call[1:] for call in package.calls if call[0] == "log"]
    assert logged == [
        ({"reward/mean": 0.5, "version": 5}, {}),
        ({"evaluation/a/greedy": 0.1, "version": 4}, {}),
    ]


def logged_by_mlflow(monkeypatch: pytest.MonkeyPatch, *steps: dict[str, float]) -> list[dict[str, float]]:
    package = Package()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    tracker = MlflowTracker("experiment", "name", "id", {})
    for version, scalars in enumerate(steps, 1):
        tracker.log_scalars(step(1.0, version), scalars)
    return [call[1] for call in package.calls if call[0] == "log_metrics"]


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("reward_metrics/acc@1", "reward_metrics/acc_1"),
        ("a//b", "a/_/b"),
        ("a/", "a/_"),
        ("../a", "_/a"),
        ("...", "_."),
        ("a" * 300, "a" * 200 + "-eab546"),
    ],
)
def test_a_metric_whose_name_mlflow_refuses_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, name: str, becomes: str
) -> None:
    assert logged_by_mlflow(monkeypatch, {name: 1, "reward/mean": 2}) == [{becomes: 1.0, "reward/mean": 2.0}]


def test_two_metrics_that_would_get_one_name_in_mlflow_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = {"acc@1": 1.0, "acc#1": 2.0, "acc_1": 3.0}
    first, again = logged_by_mlflow(monkeypatch, scalars, dict(reversed(scalars.items())))
    assert sorted(first.values()) == [1.0, 2.0, 3.0] and first["acc_1"] == 3.0
    assert again == first, "a curve goes on under its name"
