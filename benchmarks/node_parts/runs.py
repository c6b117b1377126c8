"""Whole runs of the large model on half of the GPUs as ranks, with replicas on the others: how long a version
takes to be served, what a checkpoint stops, and what happens when processes are killed."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.config.load import load
from millrace.core.events import Event
from millrace_chaos import aftermath
from millrace_chaos.attack import SUPERVISION, Attack
from millrace_chaos.child_run import ChildRun
from node_parts.setting import Figures, Note, Setting, toml

POLL_S = 0.02
LAST_LINES = 40
FOR_EVER = 1_000_000
CHECKPOINTS_EVERY = 2


class Watched:
    """A run, and the attacks on it. `running`: trajectories that each replica decodes, by its last report."""

    def __init__(self, run: ChildRun, limit_s: float) -> None:
        self.run, self._limit_s = run, limit_s
        self.attacks: list[Attack] = []
        self.running: dict[str, int] = {}

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Raises: RuntimeError: the run ended before `what`, or `what` does not come in time."""
        deadline_s = time.monotonic() + self._limit_s
        while not done():
            code = self.run.exit_code
            self._take_in(self.run.poll())
            if code is not None and not done():
                raise RuntimeError(f"the run ended before {what}, status {code}:\n{self._last_words()}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self._limit_s:g} s without {what}:\n{self._last_words()}")
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Raises: RuntimeError: the run fails, or does not end in time."""
        self.until(lambda: self.run.exit_code is not None, "its end")
        self._take_in(self.run.poll())
        if self.run.exit_code:
            raise RuntimeError(f"the run failed with status {self.run.exit_code}:\n{self._last_words()}")

    def kill(self, role: str, name: str) -> Attack:
        """Kill this process, and wait until another does its work."""
        attack = Attack(role, name, "kill", self.run.version, time.time())
        self.attacks.append(attack)
        os.kill(self.run.pids(role)[name], signal.SIGKILL)
        self.until(lambda: attack.recovery_s is not None, f"a new {name}")
        return attack

    def _last_words(self) -> str:
        return self.run.last_words(LAST_LINES)

    def _take_in(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "report":
                self.running[event.fields["replica"]] = event.fields["running"]
            for attack in self.attacks:
                attack(event)


class Runs:
    """Sessions of one run directory, each with keys of its own."""

    def __init__(self, setting: Setting, name: str) -> None:
        self._setting, self._directory = setting, setting.scratch / name
        self._directory.mkdir(parents=True)
        self._file = self._directory / "run.toml"
        ranks, _ = division(setting.gpus)
        configuration = setting.configuration(
            setting.large(),
            ranks=ranks,
            replicas=setting.gpus - ranks,
            optimizer={"lr": 1e-6},
            checkpoints={"every": CHECKPOINTS_EVERY},
        )
        self._file.write_text(toml(configuration))
        self._memory = aftermath.shared_memory()

    @contextmanager
    def session(self, *overrides: str) -> Iterator[Watched]:
        """Started, or resumed. All of its processes end with the block."""
        run = ChildRun(self._file, self._directory / "run", overrides)
        try:
            run.start()
            yield Watched(run, self._setting.sized(420.0, 240.0))
        finally:
            run.end()

    def checks(self, run: ChildRun, orphans: list[int], *overrides: str) -> Figures:
        """The claims about a run that reached its end. Raises: RuntimeError: one does not hold."""
        found = [
            *aftermath.check_ledger(run.directory.ledger, load(self._file, overrides)),
            aftermath.check_served(run.events),
            *aftermath.check_remains(orphans, self._memory),
        ]
        if failed := [check for check in found if not check.holds]:
            raise RuntimeError("; ".join(f"{check.claim}: {check.detail}" for check in failed))
        return {check.claim: check.detail for check in found}


def division(gpus: int) -> tuple[int, int]:
    """Ranks of the trainer, and those after a resume."""
    ranks = max(1, gpus // 2)
    return (ranks, ranks // 2) if gpus >= 8 else (ranks, ranks + 1)


# ------------------------------------------------------------ parts


def loop_part(setting: Setting, note: Note) -> None:
    """A run under load: the time from the end of a step until a replica serves its version, the stall of
    checkpoints, and a resume on another number of ranks."""
    runs, steps = Runs(setting, "loop"), setting.sized(8, 4)
    before, after = division(setting.gpus)
    note({"ranks": before, "replicas": setting.gpus - before})
    with runs.session(f"steps={steps}") as watched:
        watched.finish()
        note(publication(watched.run.events) | checkpoints(watched.run.events) | gaps(watched.run.events))
        leftovers = watched.run.leftovers()
    longer = (f"steps={steps + 2}", f"trainer.shard={after}", f"rollout.replicas={setting.gpus - after}")
    began_s = time.time()
    with runs.session(*longer) as watched:
        watched.until(lambda: watched.run.version > steps, "a step after the resume")
        steps_s = [event.wall_s for event in watched.run.events if event.kind == "step"]
        note({"resumed_on_ranks": after, "resume_s": min(s for s in steps_s if s > began_s) - began_s})
        watched.finish()
        note({"checks": runs.checks(watched.run, leftovers + watched.run.leftovers(), *longer)})


def faults_part(setting: Setting, note: Note) -> None:
    """kill -9 of a replica that decodes, of a rank of the trainer, and of the controller. Each time the run
    goes on, and at its end its accounts close."""
    runs = Runs(setting, "faults")
    budgets = (f"steps={FOR_EVER}", *SUPERVISION[1:])
    with runs.session(*budgets) as watched:
        run = watched.run
        watched.until(lambda: run.version >= 2 and any(watched.running.values()), "a replica under load")
        busiest = max(watched.running, key=lambda name: watched.running[name])
        version = run.version
        note({"replica_recovery_s": watched.kill("replica", busiest).recovery_s})
        note({"versions_meanwhile": run.version - version})
        rank = max(run.pids("trainer"))
        note({"killed_rank": rank, "rank_recovery_s": watched.kill("trainer", rank).recovery_s})
        version = run.version
        watched.until(lambda: run.version > version, "a step after the death of a rank")
        orphans = run.kill_controller()
        run.poll()
    last = (f"steps={run.version + 3}", *SUPERVISION[1:])
    with runs.session(*last) as watched:
        watched.finish()
        orphans += watched.run.leftovers()
        note({"checks": runs.checks(watched.run, orphans, *last)})


# ------------------------------------------------------------ what the events of a run say


def publication(events: Sequence[Event]) -> Figures:
    """Seconds from the end of a step until the first replica serves its version or a newer one, and until
    all do; and the parts of this time."""
    replicas = {event.fields["replica"] for event in events if event.kind == "pulled"}
    first_s, all_s = [], []
    for step in (event for event in events if event.kind == "step"):
        served = served_after(events, step)
        first_s += [min(served.values())] if served else []
        all_s += [max(served.values())] if served.keys() == replicas else []
    published = [event.fields for event in events if event.kind == "published"]
    return {
        "weights_bytes": published[-1]["weights_bytes"],
        "versions_served": len(first_s),
        "served_s_median": statistics.median(first_s),
        "served_s_max": max(first_s),
        "served_by_all_s_max": max(all_s, default=None),
        "publish_stall_s": statistics.median(fields["stall_s"] for fields in published),
        "digest_s": statistics.median(fields["digest_s"] for fields in published),
        "stage_s": median_of(events, "staged", "stage_s"),
        "pull_s": median_of(events, "pulled", "pull_s"),
        "swap_s": median_of(events, "pulled", "swap_s"),
    }


def served_after(events: Sequence[Event], step: Event) -> dict[str, float]:
    """Seconds, by replica, until it serves what the step made or a newer version."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.kind == "pulled" and event.fields["version"] >= step.fields["version"]:
            seconds.setdefault(event.fields["replica"], event.wall_s - step.wall_s)
    return seconds


def median_of(events: Sequence[Event], kind: str, field: str) -> float | None:
    values = [event.fields[field] for event in events if event.kind == kind]
    return statistics.median(values) if values else None


def checkpoints(events: Sequence[Event]) -> Figures:
    made = [event.fields for event in events if event.kind == "checkpoint"]
    size = sum(file.stat().st_size for file in Path(made[-1]["path"]).rglob("*") if file.is_file())
    return {
        "checkpoint_bytes": size,
        "checkpoint_stall_s": max(fields["stall_s"] for fields in made),
        "checkpoint_save_s": max(fields["save_s"] for fields in made),
    }


def gaps(events: Sequence[Event]) -> Figures:
    """|trainer - engine| over the tokens of all steps, by staleness: means in nats. And the trained tokens
    a second after the first step."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    steps = [event for event in events if event.kind == "step"]
    for event in steps:
        for staleness, (mean, _, count) in event.fields["logprob_gap"].items():
            sums[str(staleness)][0] += mean * count
            sums[str(staleness)][1] += count
    tokens = sum(event.fields["trained_tokens"] for event in steps[1:])
    return {
        "gap_by_staleness": {staleness: total / count for staleness, (total, count) in sums.items()},
        "trained_tokens_per_s": tokens / (steps[-1].wall_s - steps[0].wall_s),
    }
