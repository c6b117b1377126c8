"""Whole runs that train an adapter: published alone, killed, resumed, exported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.numpy import load_file
from tests.long import long
from tests.runs import events, summary, train, weights

from millrace.cli.app import run as millrace
from millrace.run_directory.run_directory import RunDirectory

DEADLINE_S = 200.0
ADAPTER = ("adapter.rank=4", "adapter.kind=dora", "optimizer.lr=1e-3")

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def undisturbed(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("undisturbed") / "run", *ADAPTER)


@long
def test_replicas_compute_what_the_trainer_computes(undisturbed, start):
    pulled = events(undisturbed, "pulled")
    digests = {e.fields["version"]: e.fields["digest"] for e in events(undisturbed, "published")}
    assert pulled and all(digests[e.fields["version"]] == e.fields["digest"] for e in pulled)
    assert summary(undisturbed)["logprob_gap_staleness0"]["max"] < 1e-4
    model = (start.parent / "start" / "model.safetensors").stat().st_size
    assert all(e.fields["weights_bytes"] < model / 2 for e in events(undisturbed, "published"))


class Killer:
    """A sink that sends SIGKILL to the trainer after its second step."""

    def __init__(self):
        self._pid, self.killed = 0, False

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["role"] == "trainer" and not self.killed:
            self._pid = event.fields["pid"]
        if event.kind == "step" and event.fields["version"] == 2 and not self.killed:
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


@long
def test_a_killed_trainer_changes_nothing_about_the_result(start, undisturbed, tmp_path):
    killer = Killer()
    run = train(start, tmp_path / "run", *ADAPTER, sinks=(killer,))
    assert killer.killed and [e.fields["name"] for e in events(run, "worker_died")] == ["trainer"]
    assert weights(run) == weights(undisturbed)


@long
def test_a_killed_run_resumes_to_the_same_weights(start, undisturbed, tmp_path):
    run = RunDirectory(tmp_path / "run")
    sets = [part for key in ADAPTER for part in ("--set", key)]
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(run.path)]
    with subprocess.Popen([*command, *sets], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not (run.events.exists() and len(events(run, "step")) >= 3):
            assert time.monotonic() < deadline, "it made no three steps"
            time.sleep(0.01)
        process.kill()
    resume = [*command, *sets, "--resume"]
    subprocess.run(resume, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    assert weights(run) == weights(undisturbed)


def test_an_exported_checkpoint_is_the_model_of_the_end_and_its_adapter(undisturbed, start, capsys):
    assert millrace(["export", str(undisturbed.path)]) == 0
    exports = undisturbed.path / "exports"
    newest, at_the_end = (
        load_file(path / "model.safetensors") for path in (exports / "v00000004", undisturbed.model)
    )
    assert all((newest[name] == at_the_end[name]).all() for name in at_the_end)
    assert millrace(["export", str(undisturbed.path), "--adapter"]) == 0
    assert (exports / "v00000004-adapter" / "adapter_config.json").is_file()
    capsys.readouterr()


def test_a_run_without_an_adapter_has_none_to_export(start, tmp_path, capsys):
    run = train(start, tmp_path / "run", "steps=2")
    assert millrace(["export", str(run.path), "--adapter"]) == 1
    assert "it has no adapter to write" in capsys.readouterr().err


def test_two_ranks_publish_one_adapter(start, tmp_path):
    run = train(start, tmp_path / "run", *ADAPTER, "trainer.shard=2", "steps=2")
    digests = {e.fields["version"]: e.fields["digest"] for e in events(run, "staged")}
    pulled = events(run, "pulled")
    assert pulled and all(digests[e.fields["version"]] == e.fields["digest"] for e in pulled)
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-4
