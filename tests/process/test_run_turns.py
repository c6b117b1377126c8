"""Whole runs of episodes of several turns. Processes are killed with SIGKILL in the middle of a turn."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.long import few, long
from tests.runs import events, summary, train, weights
from tests.turn_runs import make_start

import millrace
from conformance import WAIT_S
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.completion.columns import OBSERVED
from millrace.core.events import Event
from millrace.core.types import Trajectory
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("warm")
ANSWERS = 150  # of 64 episodes there are more, in every run


@pytest.fixture
def turns(tmp_path) -> Path:
    return make_start(tmp_path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory, warm) -> RunDirectory:
    """The run when nothing is killed."""
    directory = tmp_path_factory.mktemp("calm")
    return train(make_start(directory), directory / "run")


def plan(config: Path, what: str, seed: int, count: int) -> list[int]:
    """Let the environment do harm at some of its answers."""
    at = sorted(random.Random(seed).sample(range(1, ANSWERS), count))
    (config.parent / "points").write_text(json.dumps({"what": what, "at": at}))
    return at


def trained(run: RunDirectory) -> list[Trajectory]:
    with LedgerReader(run.ledger) as reader:
        ids = [tid for step in reader.steps() for tid in step.trajectory_ids]
        assert len(ids) == len(set(ids))
        return [reader.trajectory(tid) for tid in sorted(ids)]


def check(run: RunDirectory, calm: RunDirectory) -> None:
    """All is as in the run in which nothing was killed."""
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    for one, due in zip(trained(run), trained(calm), strict=True):
        assert (one.trajectory_id, one.columns, one.reward) == (due.trajectory_id, due.columns, due.reward)
        assert one.metrics == due.metrics
    assert weights(run) == weights(calm)


def exchanges(run: RunDirectory) -> set[tuple[str, str]]:
    """What environments were told, and what they answered; nothing at the end of an episode."""
    return {tuple(json.loads(line)) for line in (run.path.parent / "exchanges").read_text().splitlines()}


def failures(run: RunDirectory) -> list[dict]:
    """Of a run that goes on when trajectories fail: each has a reason, and no reward."""
    accounting = summary(run)["accounting"]
    ended = sum(accounting[state] for state in ("trained", "failed", "rejected"))  # rejected: no baseline
    assert ended == accounting["admitted"] and accounting["trained"]
    failed = [one for one in millrace.Run(run.path).trajectories() if one["state"] == "failed"]
    assert len(failed) == accounting["failed"] and all(one["reward"] is None for one in failed)
    trained(run)
    return failed


class Killer:
    """Kills reward workers whose environment is held, and replicas that have just been given a later turn.

    `replicas`: at which of these leases.
    """

    def __init__(self, directory: Path, replicas: Sequence[int] = ()) -> None:
        self.killed: list[int] = []
        self._directory, self._replicas, self._leases = directory, replicas, 0
        self._pids, self._dead, self._ended = dict[str, int](), set[int](), threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __call__(self, event: Event) -> None:
        if event.kind == "worker_started":
            self._pids[event.fields["name"]] = event.fields["pid"]
        if event.kind == "leased" and event.fields["resumed_tokens"]:
            self._leases += 1
            if self._leases in self._replicas:
                self._kill(self._leases, self._pids[event.fields["replica"]])

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.01):
            for file in self._directory.glob("held-*"):
                if pid := file.read_text():
                    file.unlink()
                    self._kill(int(file.name.partition("-")[2]), int(pid))

    def _kill(self, point: int, pid: int) -> None:
        with suppress(ProcessLookupError):
            if pid not in self._dead:  # not noticed yet: a second kill would be no second death
                os.kill(pid, signal.SIGKILL)
                self.killed.append(point)
                self._dead.add(pid)


def test_what_was_sampled_and_observed_is_what_is_trained(calm):
    tokenizer, answers, most = load_tokenizer(calm.model), exchanges(calm), 0
    trajectories = {one.trajectory_id: one for one in trained(calm)}
    for one in trajectories.values():
        columns, actions, texts = one.columns, list[str](), list[str]()
        for start, stop, sampled in columns.turns():
            ids = columns.tokens[start:stop].tolist()
            if sampled:
                assert ids[-1] == tokenizer.eos_token_id or stop == len(columns)
                actions.append(tokenizer.decode(ids, skip_special_tokens=True))
                continue
            texts.append(tokenizer.decode(ids))
            assert tokenizer.encode(texts[-1], add_special_tokens=False) == ids
            assert all(math.isnan(logprob) for logprob in columns.logprobs[start:stop])
            assert set(columns.versions()[start:stop]) == {OBSERVED}
        assert answers >= set(zip(actions, texts, strict=False))
        assert actions[-1] in {action for action, _ in answers}
        assert len(actions) == len(texts) + 1 == one.metrics["turns"]
        most = max(most, len(actions))
    assert most == 4
    forks = [fork for one in trajectories.values() for fork in one.columns.forks]
    assert {bool(fork.after) for fork in forks} == {False, True}  # in place of the prompt, and after a turn
    with LedgerReader(calm.ledger) as reader:
        batches = [[trajectories[tid].columns for tid in step.trajectory_ids] for step in reader.steps()]
    for step, batch in zip(events(calm, "step"), batches, strict=True):
        assert step.fields["trained_tokens"] == sum(n for one in batch for _, n in one.sampled_runs)
        # The trainer computes the log-probs anew. Other tokens, sampled or observed, would have other ones.
        assert [gap[1] < 1e-4 for gap in step.fields["logprob_gap"].values()] == [True]


@pytest.mark.parametrize("seed", few([1, 2]))
def test_reward_workers_killed_in_a_turn_change_nothing(seed, turns, calm, tmp_path):
    at = plan(turns, "held", seed, 4)
    with Killer(tmp_path) as killer:
        run = train(turns, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    assert set(killer.killed) <= set(at)  # one death may end several held environments
    assert 2 <= len(events(run, "worker_died")) <= len(killer.killed)
    check(run, calm)


@pytest.mark.parametrize("seed", few([4, 3]))
def test_replicas_killed_in_a_turn_change_nothing(seed, turns, calm, tmp_path):
    at = sorted(random.Random(seed).sample(range(1, 60), 4))
    with Killer(tmp_path, at) as killer:
        run = train(turns, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    assert set(killer.killed) <= set(at) and len(events(run, "worker_died")) == len(killer.killed) >= 2
    check(run, calm)


def resumed_to_the_end(turns: Path, directory: Path, *changes: str) -> tuple[RunDirectory, int]:
    """A run in processes, resumed whenever its controller is killed, and how often it was."""
    run, kills = RunDirectory(directory / "run"), 0
    changed = [word for change in changes for word in ("--set", change)]
    train_it = [sys.executable, "-m", "millrace", "train", str(turns), "--run-dir", str(run.path), *changed]
    while True:
        resume = ["--resume"] if run.path.exists() else []
        with subprocess.Popen([*train_it, *resume], stdout=subprocess.DEVNULL) as controller:
            (directory / "controller").write_text(str(controller.pid))
            code = controller.wait(WAIT_S)
        if code != -signal.SIGKILL:
            assert code == 0
            return run, kills
        kills += 1


def test_a_controller_killed_in_a_turn_resumes_the_same(turns, calm, tmp_path):
    at = plan(turns, "controller", 5, 3)
    run, kills = resumed_to_the_end(turns, tmp_path)
    assert 1 <= kills <= len(at)
    check(run, calm)


@long
def test_episodes_restored_from_snapshots_end_as_if_nothing_was_killed(turns, calm, tmp_path):
    at = plan(turns, "controller", 8, 3)
    run, kills = resumed_to_the_end(turns, tmp_path, f"reward.path={tmp_path}/acting.py:Restoring")
    assert 1 <= kills <= len(at) and (tmp_path / "restored").exists()
    check(run, calm)
    with LedgerReader(run.ledger) as reader:
        first = reader.steps()[0].trajectory_ids
    left = {int(path.name.partition(".")[0]) for path in (run.path / "snapshots").iterdir()}
    assert not left & set(first)


def test_an_episode_that_cannot_be_repeated_fails_and_the_run_goes_on(turns, tmp_path):
    plan(turns, "held", 6, 3)
    lasting = f"reward.path={tmp_path}/acting.py:Lasting"
    with Killer(tmp_path) as killer:
        run = train(turns, tmp_path / "run", "supervision.restarts=100", lasting, sinks=(killer,))
    assert killer.killed
    failed = failures(run)
    assert failed and all("cannot be repeated" in one["reason"] for one in failed)


@pytest.mark.parametrize("times", few([1, 3]))
def test_an_environment_that_hangs_fails_alone(times, turns, tmp_path):
    at = plan(turns, "held", 7, times)
    run = train(turns, tmp_path / "run", "reward.timeout_s=12")
    failed = failures(run)
    assert 1 <= len(failed) <= len(at)
    assert all("took longer than `reward.timeout_s` (12 s)" in one["reason"] for one in failed)
    assert not events(run, "worker_died")


def test_rewards_of_turns_are_the_trajectorys_and_reach_the_trainer(turns, calm, tmp_path):
    run = train(turns, tmp_path / "run", "algorithm.kind=mt_grpo")
    for one in trained(run):
        rewards = [one.metrics.get(f"turn_{k + 1}", 0.0) for k in range(int(one.metrics["turns"]))]
        assert one.reward == pytest.approx(sum(rewards))
    same, others = ([one.columns for one in trained(each)[:16]] for each in (run, calm))
    assert same == others and weights(run) != weights(calm)
