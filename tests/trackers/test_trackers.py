"""A whole run, killed and resumed, in W&B, MLflow, Trackio and TensorBoard: each package reads back what the
run itself recorded."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trackers.recorded import Steps, of_mlflow, of_tensorboard, of_trackio, of_wandb

from millrace.observe.sinks.jsonl import read_events
from millrace.run_directory.run_directory import RunDirectory

ON = "observe.tensorboard=true", "observe.wandb=p", "observe.mlflow=p", "observe.trackio=p"
DEADLINE_S = 140.0  # twice within the timeout of one test


def command(start: Path, run: RunDirectory, *more: str) -> list[str]:
    arguments = ["train", str(start), "--run-dir", str(run.path)]
    sets = [word for one in (*ON, "observe.samples_every=1") for word in ("--set", one)]
    return [sys.executable, "-m", "millrace", *arguments, *sets, *more]


class Trackers:
    """What the four trackers have of a run."""

    def __init__(self, run: RunDirectory, stores: Path, project: str = "p") -> None:
        self._run, self._stores, self._project = run.path, stores, project

    def read(self, name: str) -> Steps:
        match name:
            case "tensorboard":
                return of_tensorboard(self._run) if (self._run / "tensorboard").exists() else []
            case "wandb":
                return of_wandb(self._run)
            case "mlflow":
                return of_mlflow(self._stores, self._project) if (self._stores / "mlflow.db").exists() else []
        return of_trackio(self._project)


NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


@pytest.fixture(scope="module")
def resumed(
    start: Path, stores: Path, offline: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunDirectory, Trackers, int]]:
    """A run that is killed when each tracker has two steps, then resumed for three more: the run, what its
    trackers have, and the version at which it was killed."""
    run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
            patch.setenv(name, offline[name])
        trackers = Trackers(run, stores)
        log = (run.path.parent / "said").open("w")
        arguments = command(start, run, "--set", "steps=100000")
        with subprocess.Popen(arguments, env=offline, stdout=log, stderr=log, cwd=stores) as first:
            try:
                wait_until_all_have_steps(trackers, first)
            finally:
                first.send_signal(signal.SIGKILL)
        killed_at = max(line["version"] for line in made(run))
        again = command(start, run, "--set", f"steps={killed_at + 3}", "--resume")
        subprocess.run(again, env=offline, stdout=log, stderr=log, cwd=stores, check=True, timeout=DEADLINE_S)
        yield run, trackers, killed_at


def wait_until_all_have_steps(trackers: Trackers, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    for name in NAMES:
        while len(trackers.read(name)) < 2:
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline_s, f"{name} has no two steps in time"
            time.sleep(0.5)


def made(run: RunDirectory) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl` without the replayed ones."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line for line in lines if not line["replayed"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_the_run_s_own_values_and_no_step_twice(
    name: str, resumed: tuple[RunDirectory, Trackers, int]
) -> None:
    run, trackers, killed_at = resumed
    own = {
        line["version"]: {key: value for key, value in line.items() if "/" in key and value is not None}
        for line in made(run)
    }
    steps = trackers.read(name)
    versions = [version for version, _ in steps]
    assert len(versions) == len(set(versions)), "a step twice"
    assert set(versions) <= set(own) and {killed_at + 1, killed_at + 2, killed_at + 3} <= set(versions)
    assert min(versions) <= killed_at, "nothing is left of the session that was killed"
    for version, scalars in steps:
        assert scalars == pytest.approx(own[version], rel=1e-6, abs=1e-9)


@pytest.mark.smoke
def test_a_run_of_two_steps_is_in_every_tracker(
    start: Path, stores: Path, offline: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, offline[name])
    run = RunDirectory(tmp_path / "run")
    projects = [f"observe.{name}=short" for name in NAMES[1:]]
    arguments = command(start, run, *(word for one in ["steps=2", *projects] for word in ("--set", one)))
    said = subprocess.DEVNULL
    subprocess.run(arguments, env=offline, stdout=said, cwd=stores, check=True, timeout=DEADLINE_S)
    trackers = Trackers(run, stores, "short")
    assert [[version for version, _ in trackers.read(name)] for name in NAMES] == [[1, 2]] * len(NAMES)


def test_nothing_failed_in_this_run(resumed: tuple[RunDirectory, Trackers, int]) -> None:
    run, _, _ = resumed
    warned = [e.fields for e in read_events(run.events) if e.kind == "warned" and e.fields["source"] in NAMES]
    assert warned == []


def test_trackers_that_hang_or_cannot_be_written_do_not_stop_the_run(
    start: Path, offline: dict[str, str], tmp_path: Path
) -> None:
    """W&B and MLflow have a server that never answers, Trackio a directory that is a file."""
    run, file = RunDirectory(tmp_path / "run"), tmp_path / "file"
    file.write_text("no directory")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = offline | {
            "WANDB_MODE": "online",
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_INIT_TIMEOUT": "600",
            "MLFLOW_TRACKING_URI": address,
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "600",
            "TRACKIO_DIR": str(file / "trackio"),
        }
        with (tmp_path / "said").open("w") as log:
            whole = command(start, run)
            subprocess.run(
                whole, env=environment, stdout=log, stderr=log, cwd=tmp_path, check=True, timeout=DEADLINE_S
            )
    assert [line["version"] for line in made(run)] == [1, 2, 3, 4] and run.model.exists()
    warned = {e.fields["source"]: e.fields["reason"] for e in read_events(run.events) if e.kind == "warned"}
    assert {name: "was not done" in warned[name] for name in ("wandb", "mlflow")} == dict.fromkeys(
        ("wandb", "mlflow"), True
    )
    assert "it gets nothing until the run is resumed, the run goes on" in warned["trackio"]
