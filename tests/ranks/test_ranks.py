"""A whole run whose trainer has two ranks, of which one is killed for real."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest
from late_digest import LATE_VERSION
from tests.long import few, long
from tests.runs import events, summary, train, weights

from millrace.cli.app import run as command
from millrace.observe.sinks.jsonl import read_events
from millrace.run import compose
from millrace.runtime.workers import GangHandle

TWO = "trainer.shard=2"
STRUCK_S = 0.3  # so long the other rank works or waits alone

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def undisturbed(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("undisturbed") / "run", TWO)


def strike(monkeypatch, method, count):
    """Rank 1 is stopped before `method` comes for the `count`-th time, and killed in the middle of it."""
    asked, whole = [], GangHandle.call

    async def call(self, name, *args, timeout_s):
        asked.append(name)
        if name == method and asked.count(method) == count:
            pid = self.members[1].pid
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(STRUCK_S, os.kill, pid, signal.SIGKILL)
        return await whole(self, name, *args, timeout_s=timeout_s)

    monkeypatch.setattr(GangHandle, "call", call)


@pytest.mark.parametrize(("method", "count"), few([("step", 4), ("publish", 4), ("checkpoint", 2)]))
def test_a_rank_killed_in_the_middle_changes_nothing_about_the_result(
    method, count, start, undisturbed, tmp_path, monkeypatch
):
    strike(monkeypatch, method, count)
    run = train(start, tmp_path / "run", TWO)
    (death,) = events(run, "worker_died")
    assert death.fields["name"] == "trainer" and "rank 1: killed by signal 9" in death.fields["cause"]
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    staged = {e.fields["version"]: e.fields["digest"] for e in events(run, "staged")}
    assert all(staged[e.fields["version"]] == e.fields["digest"] for e in events(run, "pulled"))
    assert not events(run, "replay_differs")
    assert weights(run) == weights(undisturbed)


def test_a_rank_killed_between_its_copy_and_the_end_leaves_nothing_to_read(
    start, undisturbed, tmp_path, monkeypatch
):
    honest = compose.fleet

    def late(*run):
        fleet = honest(*run)
        return dataclasses.replace(
            fleet, trainer=dataclasses.replace(fleet.trainer, target="late_digest:LateDigest")
        )

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(compose, "fleet", late)
    strike(monkeypatch, "await_published", 1 + LATE_VERSION)
    run = train(start, tmp_path / "run", TWO)
    log = [(e.kind, e.fields.get("version")) for e in read_events(run.events)]
    (died,) = (at for at, (kind, _) in enumerate(log) if kind == "worker_died")
    assert log.index(("step", LATE_VERSION)) < died
    assert min(log.index((kind, LATE_VERSION)) for kind in ("published", "staged", "pulled")) > died
    assert not events(run, "replay_differs")
    assert weights(run) == weights(undisturbed)


def test_two_ranks_learn_the_curve_of_one(start, undisturbed, tmp_path):
    alone = train(start, tmp_path / "run")
    for one, two in zip(events(alone, "step"), events(undisturbed, "step"), strict=True):
        assert one.fields["reward_mean"] == two.fields["reward_mean"]
        assert one.fields["metrics"]["grad_norm"] == pytest.approx(
            two.fields["metrics"]["grad_norm"], rel=1e-3
        )


@long
def test_four_ranks_go_on_from_a_checkpoint_of_two(start, tmp_path):
    first = train(start, tmp_path / "run", TWO, "steps=2")
    arguments = ["--resume", "--set", "trainer.shard=4", "--set", "steps=4"]
    assert command(["train", str(start), "--run-dir", str(first.path), *arguments]) == 0
    accounting = summary(first)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    assert [e.fields["version"] for e in events(first, "step")] == [1, 2, 3, 4]
    again = [e.fields["digest"] for e in events(first, "staged") if e.fields["version"] == 2]
    assert len(again) == 2 and len(set(again)) == 1  # of other pieces, and the same weights
    assert not events(first, "replay_differs")
