"""Whole runs whose replicas generate with a `vllm serve` that runs already, and one that is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs import events, summary, train
from tests.serving import LONG, PYTHON, WITH_VLLM, end, free_port, kill, start_server, until_ready

from millrace.core.events import Event

SETTINGS = (
    "rollout.replicas=1",
    "rollout.exact=false",
    "schedule={kind='areal'}",
    "supervision.spawn_timeout_s=600",
    "supervision.heartbeat_timeout_s=60",
    "supervision.stall_s=900",
)

pytestmark = WITH_VLLM


class Serving:
    """A server at one address, and the one that takes its place."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.port, self._model, self._directory = free_port(), model, directory
        self.url = f"http://127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> Path:
        return self._directory / f"server-{len(self._processes)}.log"

    def start(self) -> None:
        log = self.log
        self._processes.append(
            start_server(self._model, self.port, log, python=str(PYTHON), **{"max-model-len": 64})
        )

    def until_ready(self) -> None:
        until_ready(self.url, self._processes[-1], self.log)

    def kill(self) -> None:
        kill(self._processes[-1])

    def end(self) -> None:
        end(self._processes[-1])


@pytest.fixture
def serving(start: Path, tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(start.parent / "start", tmp_path)
    serving.start()
    try:
        serving.until_ready()
        yield serving
    finally:
        serving.end()


class Killer:
    """A sink that kills the server while it generates after a step, and starts another at its address."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._trained = self.killed = False

    def __call__(self, event: Event) -> None:
        fields = event.fields
        self._trained |= event.kind == "step"
        in_the_middle = event.kind == "report" and fields["running"] and fields["steps_since_swap"]
        if in_the_middle and self._trained and not self.killed:
            self.killed = True
            self._serving.kill()
            self._serving.start()


def test_a_run_with_a_server_trains_every_trajectory_once(
    serving: Serving, start: Path, tmp_path: Path
) -> None:
    run = train(start, tmp_path / "run", *SETTINGS, f"rollout.servers=['{serving.url}']")
    computes = {event.fields["name"]: event.fields["computes"] for event in events(run, "computes")}
    assert serving.url in computes["replica-0"]
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 64 and accounting["failed"] == 0
    assert events(run, "worker_died") == []
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4
    assert len(list((run.path / "weights").glob("v*"))) == 1


def test_a_server_that_is_killed_is_told_and_the_run_goes_on_when_one_comes_back(
    serving: Serving, start: Path, tmp_path: Path
) -> None:
    killer = Killer(serving)
    settings = (*SETTINGS, *LONG, "steps=12", f"rollout.servers=['{serving.url}']")
    run = train(start, tmp_path / "run", *settings, sinks=(killer,))
    assert killer.killed
    died = events(run, "worker_died")[0]
    assert died.fields["name"] == "replica-0" and f"server {serving.url}" in died.fields["cause"]
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == 192 and accounting["failed"] == 0
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4
