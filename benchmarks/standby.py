"""How long a run is without a trainer after kill -9, with and without `trainer.standby`.

    python benchmarks/standby.py [--kills 6] [--only 1-rank|2-ranks] [--json]

A run with a random model of the quickstart's shape, checkpoints after every step, all on the CPU. The process
that trains is killed again and again, at any moment, once the run has all of its trainers. Seconds:

notice  from the kill until the controller has reported the death
ready   from there until a trainer has started, or the standby has its turn
commit  from there until the next step is committed that is no replay: load, replay, first step
absent  all three

Medians over two runs of each kind, which take turns. The seconds are of the wall: a quiet machine is needed.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

from common import medians, parser_of, say, sized, table
from tests.runs import make_model
from tiny_run import FOR_EVER, tiny_run

from millrace.chaos.child_run import ChildRun
from millrace.core.events import Event
from millrace.quickstart.start_model import SHAPE

OVERRIDES = (
    f"steps={FOR_EVER}",
    "schedule.kind=laminar",
    "checkpoints.every=1",
    "supervision.restarts=1000000",
    "supervision.restart_window_s=1",
)
RANKS = {"1-rank": (), "2-ranks": ("trainer.shard=2",)}
TIMEOUT_S = 120.0
KILLS, ROUNDS = sized(6, 1), sized(2, 1)
SETTLED_S = (0.5, 1.5)
"""A kill comes after a random time of this range, in which the run is whole."""


class Trainers:
    """The trainers of one run, from its events."""

    def __init__(self, run: ChildRun, num: int) -> None:
        self.run, self._num = run, num
        self.trains = "trainer"
        self.started: dict[str, int] = {}  # the process of each that is up; of several ranks the last

    def poll(self) -> list[Event]:
        fresh = self.run.poll()
        for event in fresh:
            name = event.fields.get("name", "")
            if event.kind == "took_over":
                self.trains = name
            elif event.kind == "worker_started" and event.fields["role"] == "trainer":
                self.started[name] = (event.fields.get("pids") or [event.fields["pid"]])[-1]
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
        victim, version, killed_s = self.trains, self.run.version, time.time()
        self.run.send("trainer", self.started[victim], 9)
        seen: dict[str, float] = {}

        def committed(events: list[Event]) -> bool:
            for event in events:
                kind, name = event.kind, event.fields.get("name", "")
                if kind == "worker_died" and name == victim:
                    seen.setdefault("died", event.wall_s)
                elif "died" in seen and (kind == "took_over" or (kind, name) == ("worker_started", victim)):
                    seen.setdefault("ready", event.wall_s)
                elif "ready" in seen and kind == "step" and event.fields["version"] > version:
                    seen.setdefault("commit", event.wall_s)
            return "commit" in seen

        self.until(committed)
        return {
            "notice": seen["died"] - killed_s,
            "ready": seen["ready"] - seen["died"],
            "commit": seen["commit"] - seen["ready"],
            "absent": seen["commit"] - killed_s,
        }


def absences(kills: int, rng: random.Random, *overrides: str, trainers: int) -> list[dict[str, float]]:
    """Of one run that has so many `trainers`."""
    with tiny_run(*OVERRIDES, *overrides) as run:
        make_model(run.directory.path.parent / "start", **SHAPE)
        run.start()
        watched, ones = Trainers(run, trainers), []
        watched.until(lambda events: run.version >= 3)
        for _ in range(kills):
            watched.until(lambda events: watched.whole)
            settled_s = time.monotonic() + rng.uniform(*SETTLED_S)
            watched.until(lambda events, until_s=settled_s: time.monotonic() > until_s)
            ones.append(watched.absence())
            say("  ".join(f"{part} {seconds:.3f}" for part, seconds in ones[-1].items()))
        return ones


def measure(kills: int, *ranks: str) -> dict[str, dict[str, float]]:
    rng, found = random.Random(0), dict[str, list[dict[str, float]]]()
    for _ in range(ROUNDS):
        for name, standby in {"without": False, "standby": True}.items():
            say(f"{' '.join(ranks)} {name}")
            key = f"trainer.standby={str(standby).lower()}"
            found.setdefault(name, []).extend(absences(kills, rng, key, *ranks, trainers=1 + standby))
    return {
        name: medians(ones) | {"worst": max(one["absent"] for one in ones)} for name, ones in found.items()
    }


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
