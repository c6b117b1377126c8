"""kill -9 in the middle of turns: does a run end with the same weights, bit for bit?

    python benchmarks/kills.py [--points 100] [--seed 0] [--first N] [--only SUITE] [--json]
                               [--file kills.jsonl] [--resume] [--deadline-s 120] [--steps 10]

`turns`: episodes with an environment; a reward worker, a replica or the controller is killed. `agents`:
episodes of agents that ask by HTTP; an agent, a reward worker (with the gateway in it), a replica or the
controller. `restored` and `evaluated-agents` have evaluations too, and a relay is killed, or the evaluator.
Episodes of `restored` go on from snapshots. `colocated` and `standby` are `turns` on a device that is lent in
turns, and with a standby of the trainer, and a trainer is killed too. `mixture` and `from` have one turn an
episode: two tasks in a mixture, and a run that begins from another run. Each has as many points as `--points`
says.

A point is a number of events of turns in a step, and a delay. Then one process that is in the middle of a
turn gets SIGKILL. A run has one point in each step, and its points share the verdict, which compares it with
a run that nothing disturbs: its weights, its trajectories, its evaluations, and that no process, directory or
snapshot is left. One process of imports serves all runs, so that a controller is back sooner than elsewhere.

`--file` gets one line for each point when its run has ended, and `--resume` makes the points that it has
not. `--first`: only so many points of each kind. `--deadline-s`: for one step, and so for one point. A run
with a problem keeps its directory. The exit code is 1 if a run had a problem, or a point met no turn in three
attempts. Such a point is in no row. `asked` counts the points that were due, `points` the rows.

closed          in runs whose accounts close: each trajectory once, every step once, nothing lost
equal           in runs that ended with the bytes of the undisturbed run's weights
foreign_tokens  tokens that were trained, and not sampled so in the undisturbed run
recovery_s      the longest time until the victim was of use again, if that was before the next kill; an
                agent has none
until_step_s    the longest time from a kill to the step in which it fell
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import QUICK, ROOT, parser_of, report, say, sized, table
from kill_points import ENVIRONMENTS, SUITES, Kill, KillPoint, Suite, Verdict, kill_point

sys.path.append(str(ROOT))

from tests.warm import end, forked, imported

ATTEMPTS = 3  # of a point at which no turn was under way


class Results:
    """The file of points, one line each. The first line has what decides them."""

    def __init__(self, path: Path | None, decided_by: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        if path is None:
            return
        first = json.dumps(decided_by)
        if not path.exists():
            path.write_text(f"{first}\n")
        elif not resume:
            raise SystemExit(f"{path} is there already: go on with --resume, or name another --file")
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a command that was killed leaves part of a line
        head, *lines = whole.splitlines() or [""]
        if head != first:
            raise SystemExit(f"{path} is of {head}, not of {first}: name another --file")
        if whole != text:
            path.write_text(whole)
        self.rows += map(json.loads, lines)

    def has(self, point: KillPoint) -> bool:
        return any((row["suite"], row["index"]) == (point.suite, point.index) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def row_of(kill: Kill, verdict: Verdict) -> dict[str, Any]:
    point = kill.point
    return {
        "suite": point.suite,
        "index": point.index,
        "victim": victim_of(point),
        "killed": kill.attack.name,
        "step": kill.version + 1,
        "moment": point.moment,
        "delay_s": round(point.delay_s, 4),
        "turns_met": kill.met,
        "closed": verdict.closed,
        "equal": verdict.equal,
        "foreign_tokens": verdict.foreign_tokens,
        "recovery_s": kill.attack.recovery_s,
        "until_step_s": kill.until_step_s,
        "problems": verdict.problems,
    }


def victim_of(point: KillPoint) -> str:
    if point.role == "reward worker":
        return "environment worker" if point.suite in ENVIRONMENTS else "gateway"
    return point.role


class Progress:
    def __init__(self, num_points: int) -> None:
        self._left, self._done, self._began_s = num_points, 0, time.monotonic()

    def __call__(self, kill: Kill) -> None:
        self._done += 1
        each_s = (time.monotonic() - self._began_s) / self._done
        left_s = each_s * max(0, self._left - self._done)
        where = f"step {kill.version + 1}, {kill.point.moment} events, {kill.met} turns under way"
        point = f"{kill.point.suite} {kill.point.index}: {victim_of(kill.point)} {kill.attack.name}"
        say(f"{point}: {where}; {self._done} of {self._left}, about {left_s / 60:.1f} min left")


def play_all(
    suite: Suite, points: Sequence[KillPoint], steps: int, results: Results, tell: Progress
) -> list[str]:
    """Every point, one in each step of a run. One that met no turn is tried again, at an earlier moment.
    Returns what did not hold: runs with their directories, and points that no attempt reached."""
    pending, broken = deque((point, 1) for point in points), list[str]()
    while pending:
        taken = [pending.popleft() for _ in range(min(steps, len(pending)))]
        name = f"run-{taken[0][0].index}-{taken[-1][0].index}-{taken[0][1]}"
        played = suite.play(name, [point for point, _ in taken], tell)
        verdict = suite.verdict(played)
        if verdict.evaluated or verdict.superseded:
            say(
                f"{name}: {verdict.evaluated} versions evaluated, {verdict.superseded} skipped for a newer "
                f"one (undisturbed: {verdict.superseded_undisturbed}), {verdict.replaced} replaced by one"
            )
        counted = [kill for kill in played.kills if kill.met or verdict.problems]
        for kill in counted:
            results.add(row_of(kill, verdict))
        if verdict.problems:
            broken.append(f"{played.run.directory.path}: {'; '.join(verdict.problems)}")
            say(f"WRONG: {broken[-1]}")
        else:
            shutil.rmtree(played.run.directory.path)
        done = {kill.point.index for kill in counted}
        for point, attempt in taken:
            if point.index in done:
                continue
            if attempt == ATTEMPTS:
                broken.append(f"{point.suite} {point.index}: in no turn, {ATTEMPTS} times")
                say(f"WRONG: {broken[-1]}")
            else:
                pending.append((point.earlier(), attempt + 1))
                again = f"again after {pending[-1][0].moment} events"
                say(f"{point.suite} {point.index}: in no turn; {again}")
    return broken


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures of each victim."""
    by: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: ([*SUITES].index(row["suite"]), row["victim"])):
        by.setdefault(f"{row['suite']}: {row['victim']}", []).append(row)
    return {victim: figures(mine) for victim, mine in by.items()}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "points": len(rows),
        "closed": sum(row["closed"] for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "foreign_tokens": sum(row["foreign_tokens"] for row in rows),
        "recovery_s": max((row["recovery_s"] for row in rows if row["recovery_s"]), default=None),
        "until_step_s": max((row["until_step_s"] for row in rows if row["until_step_s"]), default=None),
    }


def kill_everything(
    options: Namespace, points: Sequence[KillPoint], results: Results, directory: Path
) -> list[str]:
    """Returns as `play_all`."""
    due = [point for point in points if not results.has(point)]
    tell, broken = Progress(len(due)), list[str]()
    for name in dict.fromkeys(point.suite for point in due):
        suite = Suite(name, directory / name, options.steps, options.deadline_s)
        mine = [point for point in due if point.suite == name]
        broken += play_all(suite, mine, options.steps, results, tell)
    return broken


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--points", type=int, default=sized(100, 3), help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, help="only so many of the points of each kind")
    parser.add_argument("--only", choices=list(SUITES))
    parser.add_argument("--file", type=Path, default=None if QUICK else Path("kills.jsonl"))
    parser.add_argument("--resume", action="store_true", help="make the points that --file has not")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="for one step")
    parser.add_argument("--steps", type=int, default=sized(10, 3), help="of a run")
    options = parser.parse_args()
    options.first = min(options.points, options.first or options.points)
    decided_by = {"points": options.points, "seed": options.seed, "steps": options.steps}
    results = Results(options.file, decided_by, resume=options.resume)
    suites = [options.only] if options.only else list(SUITES)
    points = [kill_point(name, index, options.seed) for name in suites for index in range(options.first)]
    directory = Path(tempfile.mkdtemp(prefix="millrace-kills-"))
    warm, server = imported()
    try:
        with forked(warm):
            broken = kill_everything(options, points, results, directory)
    finally:
        end(warm, server)
    wrong = [row for row in results.rows if row["problems"]]
    failed = bool(wrong or broken)
    if not failed:
        shutil.rmtree(directory)
    victims = summary(results.rows)
    if victims:
        table(victims, first="victim")
    counts = {"asked": len(points), "points": len(results.rows), "wrong": len(wrong)}
    report({**counts, "broken": broken, "victims": victims}, as_json=options.json)
    sys.exit(failed)


if __name__ == "__main__":
    main()
