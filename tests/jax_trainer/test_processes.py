"""Runs whose trainer has a process on each of two logical hosts. A process that dies ends the others."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.runs import events, summary, train

from millrace.core.errors import WorkerError
from millrace.core.events import Event
from millrace.run_directory.run_directory import RunDirectory
from millrace_jax.devices import processes

RUN = ("trainer.backend=jax", "optimizer.eps=1e-4", "steps=6")
HOSTS = ("runtime.hosts=2", "trainer.hosts=2", "trainer.shard=2")

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def in_one_process(start: Path, warm: None, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(start, tmp_path_factory.mktemp("one") / "run", *RUN)


def assert_equal_weights(run: RunDirectory, other: RunDirectory) -> None:
    found, due = (load_file(each.model / "model.safetensors") for each in (run, other))
    assert found.keys() == due.keys()
    for name in due:
        np.testing.assert_allclose(found[name], due[name], atol=1e-5, rtol=0, err_msg=name)


class Signals:
    """A sink that sends a signal to processes of the trainer, once, after the event of a version."""

    def __init__(self, number: signal.Signals, ranks: tuple[int, ...], kind: str, version: int) -> None:
        self.number, self.ranks, self._due = number, ranks, (kind, version)
        self._pids, self.sent = list[int](), False

    def __call__(self, event: Event) -> None:
        if event.kind == "worker_started" and event.fields["name"] == "trainer":
            self._pids = event.fields["pids"]
        if not self.sent and (event.kind, event.fields.get("version")) == self._due:
            self.sent = True
            for rank in self.ranks:
                os.kill(self._pids[rank], self.number)


@pytest.mark.parametrize("signals", [
    Signals(signal.SIGTERM, (0, 1), "published", 2),
    Signals(signal.SIGKILL, (0,), "published", 3),
    Signals(signal.SIGKILL, (1,), "step", 5),
], ids=["SIGTERM to both", "the first is killed", "the second is killed"])  # fmt: skip
def test_processes_on_two_hosts_train_as_one_whatever_signal_they_get(
    signals: Signals, start: Path, in_one_process: RunDirectory, tmp_path: Path
) -> None:
    """SIGTERM is for the controller alone. A process that is killed ends the other, and the run goes on."""
    run = train(start, tmp_path / "run", *RUN, *HOSTS, sinks=(signals,))
    assert signals.sent
    deaths = [event.fields["cause"] for event in events(run, "worker_died")]
    killed = signals.ranks if signals.number == signal.SIGKILL else ()
    assert len(deaths) == len(killed)
    assert all(
        f"rank {rank}: killed by signal 9" in cause for rank, cause in zip(killed, deaths, strict=True)
    )
    assert not events(run, "replay_differs")
    assert summary(run)["accounting"]["trained"] == 16 * 6
    assert_equal_weights(run, in_one_process)


def test_a_checkpoint_of_two_processes_is_loaded_by_one(
    start: Path, in_one_process: RunDirectory, tmp_path: Path
) -> None:
    from millrace.cli.app import run as millrace

    run = train(start, tmp_path / "run", *RUN, *HOSTS, "steps=4")
    alone = ["trainer.hosts=1", "trainer.shard=1", "steps=6"]
    sets = [word for override in alone for word in ("--set", override)]
    assert millrace(["train", "--run-dir", str(run.path), "--resume", *sets]) == 0
    assert_equal_weights(run, in_one_process)


def meet(rank: int, rendezvous: str, into: dict[int, Any]) -> None:
    with ExitStack() as stack:
        try:
            into[rank] = processes.meet(rank, 3, rendezvous, stack)
        except WorkerError as error:
            into[rank] = error


def met(rendezvous: str, ranks: list[int]) -> dict[int, Any]:
    answers = dict[int, Any]()
    threads = [threading.Thread(target=meet, args=(rank, rendezvous, answers)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("listening", [False, True])
def test_processes_meet_at_a_file_or_where_the_first_one_listens(
    listening: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    (tmp_path / "rendezvous").touch()
    if listening:
        listener = socket.create_server(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MILLRACE_LISTENS", str(listener.detach()))
    answers = met(rendezvous, [0, 1, 2])
    assert len(answers) == 3 and len(set(answers.values())) == 1 and answers[0].startswith("127.0.0.1:")


@pytest.mark.parametrize("missing", [0, 2])
def test_a_process_that_does_not_come_is_named(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MEET_S_MAX", 0.5)
    (tmp_path / "rendezvous").touch()
    answers = met(f"file://{tmp_path / 'rendezvous'}", [rank for rank in range(3) if rank != missing])
    if missing:
        assert "the processes [2] did not come" in str(answers[0])
        assert "the first process did not answer" in str(answers[1])
    else:
        assert all("has not begun to listen" in str(error) for error in answers.values())
