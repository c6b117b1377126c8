"""Whether looking at a large run is quick, and what it takes from the run.

    python benchmarks/ui.py [--steps 10000] [--trajectories 1000000] [--runs 500] [--rounds 5] [--watch-s 30]
                            [--json]

A made-up run is written through the real ledger and the real logs; `millrace ui` serves it. So it does a
directory of many short runs. Drawing in the browser is not counted.

first_view_s   from the first request to the whole page of the run, by a server that has read nothing yet
view_p95_s     of every view, asked in turn: curves by each axis, newest data, samples, search, configuration
caught_up_s    until all events are read, so that the doctor speaks
cost_to_run    CPU seconds of the server per second, while a page is open and the run goes on
runs_first_s   the table of many runs, by a server that has read nothing yet
runs_list_s    the same when it is asked for again: sorted, searched and grouped; and 40 of the runs compared
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from common import ENVIRONMENT, parser_of, report, say, sized

from millrace.config.freeze import record
from millrace.config.load import Source, combine, read_mapping
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.events import Event
from millrace.core.types import Finish, Group, State, StepRecord, Trajectory
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.page import AGAIN

LETTERS = "abcdefghijklmnopqrstuvwxyz "
TOKENS, GROUP_SIZE = 24, 10
STEP_S = 5.0
ANSWER_S = 60.0
RUN_STEPS = 1000  # of a run among many
COMPARED = "&".join(f"run=run-{i}" for i in range(40))
LISTS = ("", "?sort=reward", "?find=seed%3D3", "?group=seed", f"compare?{COMPARED}&group=seed")
VIEWS = (
    "run/run",
    "run/run?by=tokens",
    "run/run?by=time",
    "data/run",
    "samples/run",
    "samples/run?choice=best",
    "samples/run?choice=worst",
    "samples/run?choice=failed",
    "samples/run?text=no+such+text",
    "samples/run?reward_min=0.5",
    "group/run?id=1",
    "config/run",
    "curves/run",
    "curves/run?smooth=0.9&log=1&by=tokens",
    "compare?run=run",
    "csv?run=run&metric=reward%2Fmean",
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=sized(10_000, 20))
    parser.add_argument("--trajectories", type=int, default=sized(1_000_000, 400))
    parser.add_argument("--runs", type=int, default=sized(500, 5))
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--watch-s", type=float, default=sized(30.0, 1.0))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = write_run(Path(scratch), asked.steps, asked.trajectories)
        figures = look(run, asked.rounds, asked.watch_s) | look_at_many(Path(scratch) / "many", asked.runs)
    figures = {"steps": asked.steps, "trajectories": asked.trajectories} | figures
    report(figures, as_json=asked.json)


# ---------------------------------------------------------------- the run


def write_config(run: RunDirectory, steps: int, model: Path, seed: int = 0) -> None:
    run.path.mkdir(parents=True)
    tree = {
        "steps": steps,
        "seed": seed,
        "model": {"path": str(model)},
        "task": {"kind": "gym", "name": "spell_backward"},
        "reward": {"kind": "gym"},
    }
    record(combine(Config, Source({}, {}), read_mapping(Config, tree, "benchmark")), run.config)


def write_run(directory: Path, steps: int, trajectories: int) -> RunDirectory:
    """Every step trains `trajectories / steps` of them, in groups of `GROUP_SIZE`."""
    run, start = RunDirectory(directory / "run"), directory / "start"
    start.mkdir()
    make_character_tokenizer(start, LETTERS)
    write_config(run, 2 * steps, start)
    groups = max(1, trajectories // steps // GROUP_SIZE)
    ledger = SqliteLedger(run.ledger, run={})
    events, metrics = EventLog(run.events), MetricsLog(run.metrics)
    events(started(steps, groups))
    began_s = time.monotonic()
    for version in range(1, steps + 1):
        batch = [group((version - 1) * groups + i, version) for i in range(groups)]
        ledger.admit(batch)
        ids = [member.trajectory_id for one in batch for member in one.members]
        ledger.commit_step(StepRecord(version, [one.group_id for one in batch], ids, {"loss": 0.1}))
        for kind, fields in trajectory_events(ids):
            events(Event(kind, STEP_S * version, STEP_S * version, fields))
        for event in stepped(version, len(ids)):
            events(event)
            metrics(event)
        if version % max(1, steps // 10) == 0:
            say(f"{version} of {steps} steps written, {time.monotonic() - began_s:.0f} s")
    for log in (ledger, events, metrics):
        log.close()
    return run


def group(group_id: int, version: int) -> Group:
    members = []
    for index in range(GROUP_SIZE):
        one = Trajectory(group_id * GROUP_SIZE + index, group_id)
        letters = [5 + (one.trajectory_id * 7 + i * (index + 1)) % len(LETTERS) for i in range(TOKENS)]
        logprobs = [-((i * index) % 40) / 10 for i in range(TOKENS)]
        one.columns = TokenColumns.of(letters, logprobs, max(0, version - 1 - index % 3))
        one.state, one.finish, one.lease, one.replica = State.BUFFERED, Finish.STOP, 1, f"replica-{index % 4}"
        one.reward = (one.trajectory_id * 2_654_435_761 % 1000) / 1000
        members.append(one)
    return Group(group_id, f"row-{group_id}", token_array([5, 6, 7]), f"spell word {group_id}>", members)


def started(steps: int, groups: int) -> Event:
    fields = {"steps": 2 * steps, "schedule": "millrace", "group_size": GROUP_SIZE, "batch_groups": groups}
    return Event("run_started", 0.0, 0.0, fields | {"replicas": ["replica-0"], "resumed_version": 0})


def trajectory_events(ids: list[int]) -> list[tuple[str, dict[str, Any]]]:
    """What a real run tells of each trajectory."""
    events: list[tuple[str, dict[str, Any]]] = []
    for one in ids:
        ended: dict[str, Any] = {
            "trajectory_id": one,
            "tokens": TOKENS,
            "versions_min": 0,
            "versions_max": 0,
            "finish": "stop",
        }
        events.append(("finished", ended))
        events.append(("scored", {"trajectory_id": one, "value": 0.5, "outcome": "scored", "reason": ""}))
    return events


def stepped(version: int, trajectories: int) -> list[Event]:
    accounts = {
        "admitted": version * trajectories,
        "trained": version * trajectories,
        "rejected": 0,
        "stale": 0,
    }
    accounts |= {"abandoned": 0, "failed": 0, "in_flight": 0}
    wave = (version * 37 % 100) / 1000
    at_s = STEP_S * version
    step = {
        "version": version,
        "reward_mean": 1 - 1 / (1 + version / 1000) + wave,
        "staleness_mean": 1 + wave,
        "staleness_max": 2,
        "staleness_histogram": {0: 100, 1: 1000, 2: 200},
        "lengths": {"groups": 10, "mean": TOKENS + wave, "std": 3.0},
        "window": {"batches": 32, "staleness_mean": 1.0, "fairness": 1 + wave, "next": 0.0},
        "groups_ready": 3,
        "trained_tokens": trajectories * TOKENS,
        "step_s": 4.0,
        "wait_s": 1.0 - wave,
        "replayed": False,
        "logprob_gap": {s: [1e-3 * 10**s, 1e-2 * 10**s, 100] for s in range(3)},
        "metrics": {"loss": wave, "entropy": 1.0, "grad_norm": 1.0 + wave, "groups_without_signal": wave},
        "accounting": accounts,
    }
    published = {"version": version, "digest": "d", "stall_s": 0.05, "weights_bytes": 1000}
    load = {"replica": "replica-0", "version": version, "running": 8, "waiting": 0, "kv_used_tokens": 10}
    load |= {
        "kv_capacity_tokens": 100,
        "generated_tokens": version * 100,
        "busy_s": at_s * 0.8,
        "idle_s": at_s * 0.2,
    }
    kinds = (("step", step), ("published", published), ("report", load))
    return [Event(kind, at_s, at_s, fields) for kind, fields in kinds]


def write_many(directory: Path, runs: int) -> None:
    """Runs that ended, with logs alone. The logs of all are copies of those of the first."""
    first = RunDirectory(directory / "run-0")
    for index in range(runs):
        run = RunDirectory(directory / f"run-{index}")
        write_config(run, RUN_STEPS, directory / "start", seed=index % 5)
        if index:
            shutil.copyfile(first.metrics, run.metrics)
            shutil.copyfile(first.events, run.events)
            continue
        events, metrics = EventLog(run.events), MetricsLog(run.metrics)
        events(started(RUN_STEPS, 1))
        for version in range(1, RUN_STEPS + 1):
            for event in stepped(version, 100):
                metrics(event)
        for log in (events, metrics):
            log.close()


# ---------------------------------------------------------------- looking


def look_at_many(directory: Path, runs: int) -> dict[str, float]:
    write_many(directory, runs)
    with serving(directory) as (base, _):
        first_s = seconds(base)
        lists = LISTS if runs >= 40 else LISTS[:-1]
        for view in lists:
            while AGAIN in read(base + view).decode():
                pass
        medians_s = {view: statistics.median(seconds(base + view) for _ in range(3)) for view in lists}
    for view, took_s in medians_s.items():
        say(f"{runs} runs {view[-20:]:20} {took_s:.3f} s")
    return {"runs_first_s": first_s, "runs_list_s": max(medians_s.values())}


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, int]]:
    """The address and the process of a server of these runs."""
    command = [sys.executable, "-m", "millrace", "ui", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.terminate()


def look(run: RunDirectory, rounds: int, watch_s: float) -> dict[str, float]:
    with serving(run.path.parent) as (base, pid):
        asked_s = time.monotonic()
        first_s = seconds(base + VIEWS[0])
        while "are read; the rest follows" in read(base + "data/run").decode():
            time.sleep(0.2)
        caught_up_s = time.monotonic() - asked_s
        for view in VIEWS:
            seconds(base + view)  # the tokenizer is loaded by the first view of samples
        times_s = {view: [seconds(base + view) for _ in range(rounds)] for view in VIEWS}
        for view, took in times_s.items():
            say(f"{view:32} {statistics.median(took):.3f} s")
        cost = watch(run, base, pid, watch_s)
    every = sorted(value for took in times_s.values() for value in took)
    p95_s = every[min(len(every) - 1, int(0.95 * len(every)))]
    return {"first_view_s": first_s, "view_p95_s": p95_s, "caught_up_s": caught_up_s, "cost_to_run": cost}


def watch(run: RunDirectory, base: str, pid: int, watch_s: float) -> float:
    """Ask as an open page does, while steps go on."""
    events, metrics = EventLog(run.events), MetricsLog(run.metrics)
    version = 1_000_000
    began_s, spent_s = time.monotonic(), cpu_s(pid)
    ask_s = began_s
    while (now_s := time.monotonic()) < began_s + watch_s:
        version += 1
        for event in stepped(version, 100):
            events(event)
            metrics(event)
        if now_s >= ask_s:
            ask_s = now_s + json.loads(read(base + "data/run"))["next_s"]
        time.sleep(0.5)
    return (cpu_s(pid) - spent_s) / (time.monotonic() - began_s)


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds(address: str) -> float:
    began_s = time.monotonic()
    read(address)
    return time.monotonic() - began_s


def read(address: str) -> bytes:
    with urlopen(address, timeout=ANSWER_S) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    main()
