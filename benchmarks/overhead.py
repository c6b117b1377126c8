"""What the control plane costs: the controller's CPU, its growth, the ledger, the start.

    python benchmarks/overhead.py [--rounds 3] [--trajectories 10000] [--json]

controller_cpu_s_per_1000   CPU seconds of the controller's process (decisions, messages, events, ledger) per
                            1,000 trajectories of a real run with two replicas of a tiny model
growth                      that cost in the last quarter of the run over the second
ledger_trajectories_per_s   admitted, reported in three parts, scored and committed, 64 at a time
startup_s                   from the command to the first trained step: `millrace train`, 0.8 M parameters
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, medians, parser_of, report, say, sized, table
from peers.start import TASKS, make_untrained, write_prompts

from millrace.config.load import load
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.events import Event
from millrace.core.types import Finish, Group, State, StepRecord, Trajectory
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.log_files import opened
from millrace.run import compose
from millrace.run_directory import run_directory

BATCH = GROUP_SIZE = 8
TOKENS = 32

CONFIG = f"""
steps = {{steps}}
model.path = "{{model}}"
batch = {{{{ prompts = {BATCH}, group_size = {GROUP_SIZE} }}}}
sampling.max_tokens = {TOKENS}
optimizer.lr = 1e-4
rollout = {{{{ replicas = 2, slots = 32, max_sequence_tokens = 96 }}}}
checkpoints.every = 1000

[task]
kind = "file"
path = "{{prompts}}"

[reward]
kind = "exact"
"""


def write_run(directory: Path, *, steps: int, hidden: int, layers: int) -> Path:
    """A configuration file, its model and its prompts."""
    task = TASKS["short"]
    model = make_untrained(task, directory / "model", hidden=hidden, layers=layers)
    write_prompts(task, directory / "prompts.jsonl", count=4000, seed=0)
    path = directory / "run.toml"
    path.write_text(CONFIG.format(steps=steps, model=model, prompts=directory / "prompts.jsonl"))
    return path


# ---------------------------------------------------------------- the controller


def controller_cost(directory: Path, trajectories: int) -> dict[str, float]:
    """A run in this process, which is the controller; CPU is read after every step."""
    steps = trajectories // (BATCH * GROUP_SIZE)
    config = load(write_run(directory, steps=steps, hidden=32, layers=2), ())
    used_s: list[float] = []

    def on_event(event: Event) -> None:
        if event.kind == "step":
            used_s.append(time.process_time())

    run = run_directory.create("run", directory / "run")
    with redirect_stderr(StringIO()):  # the live view
        asyncio.run(compose.train(config, run, asyncio.Event(), on_event))
    quarter = len(used_s) // 4
    second, last = (_per_1000(used_s, first, quarter) for first in (quarter, 3 * quarter))
    return {
        "controller_cpu_s_per_1000": _per_1000(used_s, quarter, 3 * quarter),
        "growth": last / second,
    }


def _per_1000(used_s: list[float], first: int, steps: int) -> float:
    steps = min(steps, len(used_s) - first - 1)
    return (used_s[first + steps] - used_s[first]) / (steps * BATCH * GROUP_SIZE) * 1000


# ---------------------------------------------------------------- the ledger


def ledger_rate(directory: Path, steps: int = sized(100, 5)) -> dict[str, float]:
    """Trajectories through a ledger per second of its own time, and the median durable commit."""
    ledger = SqliteLedger(directory / "ledger.sqlite", run={})
    spent_s, commits_s = 0.0, []
    for step in range(steps):
        groups = [_group(step * BATCH + i) for i in range(BATCH)]
        members = [member for group in groups for member in group.members]
        began = time.perf_counter()
        ledger.admit(groups)
        spent_s += time.perf_counter() - began
        for state in (State.LEASED, State.LEASED, State.GENERATED, State.BUFFERED):
            _advance(members, state)
            began = time.perf_counter()
            ledger.update(members)
            ledger.flush()
            spent_s += time.perf_counter() - began
        began = time.perf_counter()
        ids = [member.trajectory_id for member in members]
        ledger.commit_step(StepRecord(step + 1, [group.group_id for group in groups], ids, {}))
        commits_s.append(time.perf_counter() - began)
    ledger.close()
    spent_s += sum(commits_s)
    return {
        "ledger_trajectories_per_s": steps * BATCH * GROUP_SIZE / spent_s,
        "ledger_commit_ms": 1e3 * sorted(commits_s)[len(commits_s) // 2],
    }


def _group(group_id: int) -> Group:
    first = group_id * GROUP_SIZE
    members = [Trajectory(first + i, group_id) for i in range(GROUP_SIZE)]
    return Group(group_id, f"row:{group_id}", token_array(range(24)), "a prompt", members)


def _advance(members: list[Trajectory], state: State) -> None:
    for member in members:
        if state is State.BUFFERED:
            member.reward = 1.0
        else:
            member.columns.extend(TokenColumns.of(range(TOKENS // 3), [-0.5] * (TOKENS // 3), 0))
        member.state = state
        member.finish = Finish.STOP if state in (State.GENERATED, State.BUFFERED) else None


# ---------------------------------------------------------------- the start


def startup(directory: Path) -> dict[str, float]:
    """From the command to the first trained step."""
    config = write_run(directory, steps=1, hidden=128, layers=4)
    command: list[Any] = [sys.executable, "-m", "millrace", "train", config, "--run-dir", directory / "run"]
    began = time.time()
    subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, check=True)
    with opened(directory / "run" / "events.jsonl") as files:
        events = [json.loads(line) for _, lines in files for line in lines]
    at = {event["kind"]: event["wall_s"] - began for event in reversed(events)}
    ready = max(event["wall_s"] for event in events if event["kind"] == "worker_started") - began
    return {"startup_s": at["step"], "controller_up_s": at["run_started"], "workers_up_s": ready}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument(
        "--trajectories", type=int, default=sized(10_000, 640), help="of the controller's run"
    )
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            parts = {part: Path(name) / part for part in ("run", "ledger", "start")}
            for path in parts.values():
                path.mkdir()
            found = startup(parts["start"]) | ledger_rate(parts["ledger"])
            found |= controller_cost(parts["run"], options.trajectories)
        rounds.append(found)
        say(f"{number + 1}/{options.rounds} " + "  ".join(f"{k} {v:.3g}" for k, v in found.items()))
    result = medians(rounds)
    table({f"round {i + 1}": one for i, one in enumerate(rounds)} | {"median": result})
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
