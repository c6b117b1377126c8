"""The two files between `millrace scale` and a running run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
import time

import pytest
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.config.schema import Config
from millrace.core.errors import ConfigError, DataError, DeadlineExceeded, WorkerError
from millrace.core.events import Events
from millrace.run import scaling
from millrace.run.scaling import ScalingState, obey, scale, with_scaling
from millrace.run_directory.run_directory import RunDirectory


class Fleet:
    """Grows by one replica each time it is looked at, and its last one waits for `may_end`."""

    def __init__(self, wanted=1, *, refuses="", trouble="", may_end=lambda: True):
        self._may_end = may_end
        self.wanted, self._serving, self.refuses, self._trouble = wanted, wanted, refuses, trouble
        self.trouble = ""

    async def look(self):
        if self.refuses == "unreachable":
            raise WorkerError("the cluster cannot be reached")

    def scale(self, replicas):
        if self.refuses:
            raise ConfigError(self.refuses)
        self.wanted, self.trouble = replicas, self._trouble

    @property
    def num_serving(self):
        if abs(self.wanted - self._serving) > 1 or self._may_end():
            self._serving += (self.wanted > self._serving) - (self.wanted < self._serving)
        return self._serving

    @property
    def settled(self):
        return self._serving == self.wanted


class Controller:
    def __init__(self, fleet):
        self.replicas = fleet


def config(replicas):
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": {"replicas": replicas},
        }
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "LOOK_S", 0.005)
    return RunDirectory(tmp_path)


class Running:
    """The run's side, in a thread, with the lock of its ledger held."""

    def __init__(self, run, fleet):
        self._run, self._controller, self.warned = run, Controller(fleet), []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self):
        events = Events(lambda: 0.0, lambda: 0.0)
        events.subscribe(self.warned.append)
        task = asyncio.create_task(obey(self._run, self._controller, events, ScalingState(1, 1)))
        await asyncio.to_thread(self._ended.wait)
        task.cancel()

    def __enter__(self):
        self._lock = open(f"{self._run.ledger}.lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self._lock.close()


def test_a_command_waits_until_all_replicas_serve_and_tells_how_far_it_is(run):
    reports = []
    with Running(run, Fleet(may_end=lambda: bool(reports))):
        scale(run, 3, report=reports.append)
    assert reports[0] == "2 of 3 replicas serve"
    assert not run.scale_ask.exists()
    assert json.loads(run.scale.read_text())["replicas"] == 3
    assert os.stat(run.scale).st_mode & 0o777 == 0o600
    assert {path.name for path in run.path.iterdir()} == {"scale.json", "ledger.sqlite.lock"}


def test_a_refusal_is_told_and_the_number_stays(run):
    with Running(run, Fleet(2, refuses="no room for 7 more")), pytest.raises(WorkerError) as raised:
        scale(run, 9)
    assert "stays at 2 replicas: no room for 7 more" in str(raised.value)
    assert json.loads(run.scale.read_text())["replicas"] == 2


def test_replicas_that_cannot_start_are_told_of(run):
    with (
        Running(run, Fleet(trouble="replica-1 could not join: no memory")),
        pytest.raises(WorkerError) as raised,
    ):
        scale(run, 2)
    assert "could not join: no memory" in str(raised.value)


def test_a_run_that_is_not_running_is_not_scaled(run):
    with pytest.raises(WorkerError, match="is not running"):
        scale(run, 2)
    assert not run.scale_ask.exists()


@pytest.mark.parametrize("replicas", [-1, 4097])
def test_a_number_out_of_range_is_refused(run, replicas):
    with pytest.raises(ConfigError, match="a run has 0 to 4096"):
        scale(run, replicas)


def test_a_run_that_does_not_answer_is_told_of_and_its_ask_is_taken_back(run):
    with open(f"{run.ledger}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match="no answer for"):
            scale(run, 2, timeout_s=0.1)
    assert not run.scale_ask.exists()


def test_what_is_damaged_is_told_of_and_does_not_end_the_run(run):
    with Running(run, Fleet()) as running:
        run.scale_ask.write_bytes(b"{no")
        while not running.warned:
            time.sleep(0.001)
        scale(run, 2)
    assert running.warned[0].kind == "warned" and "is damaged" in running.warned[0].fields["reason"]


def test_a_request_that_comes_while_a_damaged_one_is_told_of_is_not_lost(run):
    """The run tells, then removes the damaged file: by then it may be another one."""

    class Asked(Events):
        def emit(self, kind, **fields):
            if kind == "warned":
                scaling._write(run.scale_ask, scaling.ScalingRequest("newer", 2))
            super().emit(kind, **fields)

    def settled():
        while (found := scaling._read(run.scale, ScalingState)) is None or not found.settled:
            time.sleep(0.001)
        return found

    async def obeyed():
        events = Asked(time.monotonic, time.time)
        task = asyncio.create_task(obey(run, Controller(Fleet()), events, ScalingState(1, 1)))
        found = await asyncio.to_thread(settled)
        task.cancel()
        return found

    run.scale_ask.write_bytes(b"{no")
    found = asyncio.run(obeyed())
    assert (found.token, found.replicas) == ("newer", 2)
    assert not list(run.path.glob("*.taken"))


def test_what_cannot_be_written_is_told_once_and_leaves_nothing_behind(run):
    class Grown(Fleet):
        looks = 0

        @property
        def settled(self):
            self.looks += 1
            return super().settled

    def taken():
        if run.scale.is_file():
            run.scale.unlink()
            run.scale.mkdir()
        return True

    fleet = Grown(may_end=taken)
    with Running(run, fleet) as running:
        scaling._write(run.scale_ask, scaling.ScalingRequest("token", 3))
        while fleet.looks < 20:
            time.sleep(0.001)
    assert [event.kind for event in running.warned] == ["warned"]
    assert "scale.json cannot be written" in running.warned[0].fields["reason"]
    assert not list(run.path.glob("*.partial"))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"token": 3}', b'{"token": "a", "replicas": 5000}', b"\xff" * 200_000]
)
def test_an_ask_that_is_none_is_refused_in_words(run, content):
    run.scale_ask.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        scaling._read(run.scale_ask, scaling.ScalingRequest)


def test_a_link_in_the_place_of_a_file_is_not_followed(run, tmp_path):
    (tmp_path / "elsewhere").write_text("{}")
    run.scale_ask.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="cannot be read"):
        scaling._read(run.scale_ask, scaling.ScalingRequest)


def standing(run, replicas, over):
    run.scale.write_text(json.dumps({"replicas": replicas, "over": over}))


def test_a_resumed_run_begins_with_the_number_asked_for_last(run):
    standing(run, 3, 1)
    for configured in (1, 3):  # of the same file as before, and of what the last session has recorded
        resumed, began = with_scaling(config(configured), run)
        assert (resumed.rollout.replicas, began.replicas, began.over) == (3, 3, 1)


def test_another_number_in_the_configuration_is_a_newer_wish(run):
    standing(run, 3, 1)
    resumed, began = with_scaling(config(2), run)
    assert (resumed.rollout.replicas, began.replicas) == (2, 2)
    assert not run.scale.exists()


def test_a_run_that_was_asked_to_have_none_begins_with_none(run):
    standing(run, 0, 2)
    resumed, began = with_scaling(config(2), run)
    assert (resumed.rollout.replicas, began.replicas) == (2, 0)


def test_an_ask_of_an_earlier_session_is_forgotten(run):
    run.scale_ask.write_text('{"token": "a", "replicas": 9}')
    assert with_scaling(config(2), run)[1].replicas == 2
    assert not run.scale_ask.exists()


def test_the_command_has_one_clear_message_for_a_run_that_is_not_running(run):
    run.config.write_text("{}")
    answer = CliRunner().invoke(app, ["scale", str(run.path), "--replicas", "2"])
    assert isinstance(answer.exception, WorkerError) and "is not running" in str(answer.exception)
    assert CliRunner().invoke(app, ["scale", str(run.path)]).exit_code == 2
