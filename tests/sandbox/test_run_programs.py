"""Whole runs whose reward runs programs. Processes are killed with SIGKILL while a program computes.

Each token of the tokenizer is a definition of `f`, and one more begins a comment. So the random model
writes right, wrong and broken programs, most of which take a while.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

import millrace
from conformance import WAIT_S
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import SandboxError
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime import process
from millrace_sandbox.sandbox import Sandbox
from tests.long import long
from tests.runs import CONFIG, events, make_model, summary, train, weights

pytestmark = pytest.mark.usefixtures("warm")
PROGRAM = "def f(x):\n for _ in range(%d_000_000): pass\n return x + %d\n"
PROGRAMS = [PROGRAM % (millions, plus) for millions in (1, 2, 3) for plus in (0, 1)]
REWARD = """
[task]
kind = "file"
path = "rows.jsonl"
answer = "none"

[reward]
kind = "code"
program_cpu_s = 60
timeout_s = 120
workers = 2
"""
ROW = '{"prompt": "%s", "tests": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}}\n'


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The configuration of a run whose completions are programs, beside its model."""
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("programs")
    make_character_tokenizer(directory / "start", "#")
    tokenizer = load_tokenizer(directory / "start")
    tokenizer.add_tokens(PROGRAMS)
    tokenizer.save_pretrained(directory / "start")
    make_model(directory / "start")
    (directory / "rows.jsonl").write_text("".join(ROW % ("#" * number) for number in range(1, 9)))
    head, _, rest = CONFIG.partition("[task]")
    path = directory / "run.toml"
    path.write_text(head + REWARD + "\n[batch]" + rest.partition("[batch]")[2].replace("= 16", "= 4"))
    return path


@pytest.fixture(scope="module")
def calm(programs, tmp_path_factory, warm) -> RunDirectory:
    """That run, when nothing is killed."""
    return train(programs, tmp_path_factory.mktemp("calm") / "run")


@cache
def expected(completion: str) -> float:
    """The reward of a completion, by this process: nothing in it does harm."""
    module: dict = {}
    with suppress(SyntaxError):
        exec(completion, module)
    return float("f" in module and module["f"](1) == 2)


def check(run: RunDirectory, calm: RunDirectory) -> None:
    """All is as in the run in which nothing was killed."""
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    with LedgerReader(run.ledger) as reader:
        assert sorted(i for step in reader.steps() for i in step.trajectory_ids) == list(range(64))
    check_rewards(run)
    assert weights(run) == weights(calm)


def check_rewards(run: RunDirectory) -> None:
    trajectories = millrace.Run(run.path).trajectories()
    scored = {one["completion"]: one["reward"] for one in trajectories if one["state"] != "failed"}
    assert scored == {completion: expected(completion) for completion in scored}
    assert set(scored.values()) == {0.0, 1.0}
    assert all(one["reward"] is None for one in trajectories if one["state"] == "failed")


class Tree:
    """The processes of the sandbox below reward workers, by what they are."""

    def __init__(self, workers: list[int]) -> None:
        self.above = process.parents()  # looked up once: short programs are over soon

        def below(pids: list[int]) -> list[int]:
            return [pid for pid, parent in self.above.items() if parent in pids]

        self.warm = [pid for pid in below(below(workers)) if b"zygote" in command(pid)]
        self.wardens = below(self.warm)
        self.programs = below(self.wardens)
        self.all = {*self.warm, *self.wardens, *self.programs}


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if b"zygote" in command(pid)]:
        assert time.monotonic() < deadline_s, f"these processes of the sandbox go on: {left}"
        time.sleep(0.02)


class Killer:
    """Kills a process above a program that computes, `kills` times: `whats` in turn.

    A program that is run again is the first one of a new warm process, and is spared unless `again`: then the
    kills go on until a program has failed.
    """

    def __init__(self, kills: int, *whats: str, again: bool = False) -> None:
        self.killed: list[str] = []
        self.seen: set[int] = set()
        self._whats, self._again, self._first = whats, again, dict[int, int]()
        self._kills, self._workers, self._ended = kills, dict[str, int](), threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __call__(self, event) -> None:
        if event.kind == "worker_started" and event.fields["role"] == "reward worker":
            self._workers[event.fields["name"]] = event.fields["pid"]
        if event.kind == "ended" and event.fields["state"] == "failed":
            self._ended.set()

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.005):
            workers = list(self._workers.values())
            tree = Tree(workers)
            self.seen |= tree.all
            above = tree.above
            for warden in {above.get(program) for program in tree.programs} & {*tree.wardens}:
                warm = above.get(warden, 0)
                is_first = self._first.setdefault(warm, warden) == warden
                if len(self.killed) < self._kills and (self._again or not is_first):
                    above_it = {
                        "warden": warden,
                        "warm process": warm,
                        "worker": above.get(above.get(warm, 0), 0),
                    }
                    self._kill(self._whats[len(self.killed) % len(self._whats)], above_it)
                    break

    def _kill(self, what: str, pids: dict[str, int]) -> None:
        if pids[what] in {*self.seen, *self._workers.values()}:
            with suppress(ProcessLookupError):
                os.kill(pids[what], signal.SIGKILL)
                self.killed.append(what)


@long
def test_processes_killed_while_a_program_computes_change_no_reward_and_leave_nothing(
    programs, calm, tmp_path
):
    with Killer(6, "warden", "warm process", "worker") as killer:
        run = train(programs, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    kinds = ["warden", "warm process", "worker"]
    assert killer.killed[:3] == kinds  # on a loaded machine some programs are over before they are seen
    assert len(events(run, "worker_died")) == killer.killed.count("worker")
    check(run, calm)
    wait_until_gone(killer.seen)


def test_a_program_whose_warden_is_killed_twice_fails_and_is_no_zero(programs, tmp_path):
    with Killer(1000, "warden", again=True) as killer:
        run = train(programs, tmp_path / "run", sinks=(killer,))
    accounting = summary(run)["accounting"]
    states = ("trained", "failed", "rejected")  # the one member that is left of a group has no baseline
    assert accounting["failed"] and sum(accounting[state] for state in states) == accounting["admitted"]
    with LedgerReader(run.ledger) as reader:
        reasons = reader.reasons()
    alone = ("rejected", "the only scored member of its group: no baseline")
    assert all("SandboxError" in reason for state, reason in reasons if state == "failed")
    assert {one for one in reasons if one[0] == "rejected"} <= {alone}
    check_rewards(run)
    wait_until_gone(killer.seen)


@long
def test_a_controller_killed_while_a_program_computes_leaves_no_program_and_resumes_the_same(
    programs, calm, tmp_path
):
    run = RunDirectory(tmp_path / "run")
    train_it = [sys.executable, "-m", "millrace", "train", str(programs), "--run-dir", str(run.path)]
    with subprocess.Popen(train_it, stdout=subprocess.DEVNULL) as controller:
        while not (tree := Tree(workers_of(run))).programs or not events(run, "step"):
            assert controller.poll() is None, "it ended before a program was seen"
            time.sleep(0.002)
        controller.kill()
    wait_until_gone(tree.all)
    subprocess.run([*train_it, "--resume"], check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
    check(run, calm)


def workers_of(run: RunDirectory) -> list[int]:
    if not run.events.exists():
        return []
    started = events(run, "worker_started")
    return [event.fields["pid"] for event in started if event.fields["role"] == "reward worker"]
