"""How long a run is without a trainer after kill -9, with and without `trainer.standby`.

    python benchmarks/standby.py [--kills 10] [--only 1-rank|2-ranks] [--json]

A run with a random model of the quickstart's shape, checkpoints after every step, all on the CPU. The process
that trains is killed again and again, at any moment, once the run has all of its trainers. Seconds:

notice  from the kill until the controller has reported the death
ready   from there until a trainer has started, or the standby has its turn
back    from there until the trainer can take its next batch: load and replay
absent  all three, as `benchmarks/goodput.py` counts them
commit  from the kill until the next new step is committed: it also waits for its batch
cpu     CPU seconds until that commit, of the trainer that goes on, from the death or from its start

A run of each kind goes on at the same time, and a kill of one follows a kill of the other. So other work on
the machine slows both alike. Medians.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

from common import ROOT, medians, parser_of, say, sized, table
from tiny_run import FOR_EVER, tiny_run

sys.path.append(str(ROOT))

from tests.runs import make_model

from millrace.core.events import Event
from millrace.quickstart.start_model import SHAPE
from millrace_chaos.child_run import ChildRun

OVERRIDES = (
    f"steps={FOR_EVER}",
    "schedule.kind=laminar",
    "checkpoints.every=1",
    "supervision.restarts=1000000",
    "supervision.restart_window_s=1",
)
RANKS = {"1-rank": (), "2-ranks": ("trainer.shard=2",)}
TIMEOUT_S = 300.0
KILLS = sized(10, 1)
SETTLED_S = (0.5, 1.5)
"""A kill comes after a random time of this range, in which the run is whole."""


class Trainers:
    """The trainers of one run, from its events."""

    def __init__(self, run: ChildRun, num: int) -> None:
        self.run, self._num = run, num
        self.trains = "trainer"
        self.started: dict[str, list[int]] = {}  # the processes of each that is up, by rank

    def poll(self) -> list[Event]:
        fresh = self.run.poll()
        for event in fresh:
            name = event.fields.get("name", "")
            if event.kind == "took_over":
                self.trains = name
            elif event.kind == "worker_started" and event.fields["role"] == "trainer":
                self.started[name] = event.fields.get("pids") or [event.fields["pid"]]
            elif event.kind == "worker_died":
                self.started.pop(name, None)
        return fresh

    @property
    def whole(self) -> bool:
        return len(self.started) == self._num

    def until(self, done: Callable[[list[Event]], bool]) -> None:
        """Read events until `done` with those read."""
        deadline_s, events = time.monotonic() + TIMEOUT_S, list[Event]()
        while not done(events):
            events += self.poll()
            if self.run.exit_code is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run did not go on:\n{self.run.last_words()}")
            time.sleep(0.005)

    def absence(self) -> dict[str, float]:
        """Kill the one that trains, and wait for the next new step."""
        victim, killed_s = self.trains, time.time()
        spent_s = {name: cpu_s(pids) for name, pids in self.started.items() if name != victim}
        self.run.send("trainer", self.started[victim][-1], signal.SIGKILL)
        seen: dict[str, float] = {}

        def committed(events: list[Event]) -> bool:
            for event in events:
                kind, name = event.kind, event.fields.get("name", "")
                if kind == "worker_died" and name == victim:
                    seen.setdefault("died", event.wall_s)
                elif "died" in seen and (kind == "took_over" or (kind, name) == ("worker_started", victim)):
                    seen.setdefault("ready", event.wall_s)
                elif kind == "step" and event.wall_s > seen.get("ready", inf) and "commit" not in seen:
                    seen.update(times_of(event))
            return "commit" in seen

        self.until(committed)
        return {
            "notice": seen["died"] - killed_s,
            "ready": seen["ready"] - seen["died"],
            "back": seen["back"] - seen["ready"],
            "absent": seen["back"] - killed_s,
            "commit": seen["commit"] - killed_s,
            "cpu": cpu_s(self.started[self.trains]) - spent_s.get(self.trains, 0.0),
        }


def times_of(step: Event) -> dict[str, float]:
    """When it was committed, and when its trainer could take a batch; nothing of a replay."""
    fields, now_s = step.fields, step.wall_s
    return (
        {} if fields["replayed"] else {"commit": now_s, "back": now_s - fields["step_s"] - fields["wait_s"]}
    )


def measure(kills: int, *ranks: str) -> dict[str, dict[str, float]]:
    rng, ones = random.Random(0), dict[str, list[dict[str, float]]]()
    with ExitStack() as stack:
        watched = {}
        for name, standby in {"without": False, "standby": True}.items():
            key = f"trainer.standby={str(standby).lower()}"
            run = stack.enter_context(tiny_run(*OVERRIDES, key, *ranks))
            make_model(run.directory.path.parent / "start", **SHAPE)
            run.start()
            watched[name] = Trainers(run, 1 + standby)
        for trainers in watched.values():
            trainers.until(lambda events, t=trainers: t.run.version >= 3)
        for _ in range(kills):
            for name, trainers in watched.items():
                trainers.until(lambda events, t=trainers: t.whole)
                settled_s = time.monotonic() + rng.uniform(*SETTLED_S)
                trainers.until(lambda events, until_s=settled_s: time.monotonic() > until_s)
                ones.setdefault(name, []).append(one := trainers.absence())
                say(f"{name}: " + "  ".join(f"{part} {seconds:.3f}" for part, seconds in one.items()))
    return {
        name: medians(each) | {"worst": max(one["absent"] for one in each)} for name, each in ones.items()
    }


def cpu_s(pids: Sequence[int]) -> float:
    """Of processes, since they began."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each run")
    parser.add_argument("--only", choices=tuple(RANKS))
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for name, ranks in RANKS.items():
        if options.only in (None, name):
            result[name] = measure(options.kills, *ranks)
            say(name)
            table(result[name])
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
