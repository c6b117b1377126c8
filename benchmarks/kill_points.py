"""Runs of episodes in which a process is killed in the middle of a turn, once in each step: for `kills.py`.

All trajectories of a step begin and end with it (`schedule.kind = "synchronous"`). So no episode meets two
kills: one that two workers die of fails, and rightly.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT

sys.path.append(str(ROOT))

from tests import runs
from tests.turn_runs import make_agent_start, make_start

from millrace.config.load import load
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import DeadlineExceeded, MillraceError, WorkerError
from millrace.core.events import Event
from millrace.episodes.agents.agent_process import DIRECTORY as AGENTS
from millrace.episodes.snapshots import DIRECTORY as SNAPSHOTS
from millrace.ledger.reading import LedgerReader
from millrace.runtime import process
from millrace_chaos.aftermath import check_ledger, check_served
from millrace_chaos.attack import SUPERVISION, Attack
from millrace_chaos.child_run import ChildRun
from millrace_chaos.trials import TURNS, weights

SUITES = {
    "turns": ("reward worker", "replica", "controller"),
    "agents": ("agent", "reward worker", "replica", "controller"),
    "restored": ("controller", "reward worker", "replica", "relay", "evaluator"),
    "evaluated-agents": ("controller", "reward worker", "replica", "relay", "agent"),
    "colocated": ("controller", "reward worker", "replica", "relay", "trainer"),
    "standby": ("trainer", "controller", "trainer", "replica"),
    "mixture": ("controller", "replica", "relay", "trainer"),
    "from": ("controller", "replica", "relay", "trainer"),
}
"""Who is killed, of episodes with an environment, and of those with an agent that asks the gateway. The last
two of these have evaluations too, whose reward workers are among the reward workers. Episodes of `restored`
go on from snapshots. Then `turns` on a device that is lent in turns, and with a standby of the trainer; a
mixture of two tasks; and a run that begins from another run."""
AGENTS_SUITES = ("agents", "evaluated-agents")
SINGLE = ("mixture", "from")
"""Suites without an environment: an episode is one turn."""
MIXTURE = """task={ kind = "mixture", parts = [
    { name = "short", task = { kind = "gym", name = "spell_backward", template = "{metadata[word]}>",
      options = { min_word_len = 3, max_word_len = 4 } } },
    { name = "long", task = { kind = "gym", name = "spell_backward", template = "{metadata[word]}>",
      options = { min_word_len = 5, max_word_len = 6 } } },
] }""".replace("\n", "")
ENVIRONMENTS = {"turns": "Busy", "restored": "BusyRestoring", "colocated": "Busy", "standby": "Busy"}
OVERRIDES = {
    "colocated": ["rollout.colocated=true"],
    "standby": ["trainer.standby=true"],
    "mixture": [MIXTURE],
}
EVALUATION, EVERY = "held-out", 5
SUPERSEDED, REPLACED = "the evaluator was busy", "is evaluated in its place"
MOMENT_MAX = 60  # of some 100 events of turns in a step
DELAY_S_MAX = 0.05
POLL_S = 0.001
GAP_MAX = 1e-4  # between log-probs of replica and trainer; another token would have another log-prob


@dataclass(frozen=True)
class KillPoint:
    """Kill one of the processes of `role`, after `moment` events of turns of a step and `delay_s`."""

    suite: str
    index: int
    role: str
    moment: int
    delay_s: float
    draw: float  # which of the processes

    def earlier(self) -> KillPoint:
        """For a step that ended before this moment."""
        return KillPoint(self.suite, self.index, self.role, 1 + self.moment // 2, self.delay_s, self.draw)


def kill_point(suite: str, index: int, seed: int) -> KillPoint:
    rng, roles = random.Random(f"{suite} {index} {seed}"), SUITES[suite]
    most, longest_s = (MOMENT_MAX // 10, 0.0) if suite in SINGLE else (MOMENT_MAX, DELAY_S_MAX)
    moment, delay_s = rng.randint(1, most), rng.uniform(0, longest_s)
    return KillPoint(suite, index, roles[index % len(roles)], moment, delay_s, rng.random())


@dataclass
class OpenTurns:
    """The turns under way, as events tell: what a replica samples, and what waits for its answer."""

    version: int = 0
    events: int = 0  # of turns since that version
    sampled: dict[int, str] = field(default_factory=dict)  # trajectory -> replica
    waiting: set[int] = field(default_factory=set)

    def __call__(self, event: Event) -> None:
        fields = event.fields
        self.events += event.kind in TURNS
        match event.kind:
            case "leased":
                self.waiting.difference_update(fields["trajectory_ids"])
                self.sampled |= dict.fromkeys(fields["trajectory_ids"], fields["replica"])
            case "finished":
                self.sampled.pop(fields["trajectory_id"], None)
                self.waiting.add(fields["trajectory_id"])
            case "observed" | "scored" | "ended" | "restarted":
                self.waiting.discard(fields["trajectory_id"])
            case "worker_died":
                self.sampled = {one: name for one, name in self.sampled.items() if name != fields["name"]}
            case "run_started":
                self.sampled, self.waiting = {}, set()
            case "step" if fields["version"] > self.version:
                self.version, self.events = fields["version"], 0

    def __len__(self) -> int:
        return len(self.sampled) + len(self.waiting)


def open_turns(events: Iterable[Event], wall_s: float) -> OpenTurns:
    """Those at this time."""
    turns = OpenTurns()
    for event in events:
        if event.wall_s <= wall_s:
            turns(event)
    return turns


@dataclass
class Kill:
    """A kill, and what became of it."""

    point: KillPoint
    attack: Attack
    version: int  # the last committed one
    met: int  # turns of the victim that were under way
    until_step_s: float | None = None
    is_newest: bool = True  # after another kill, the time to recover would be of both

    def __call__(self, event: Event) -> None:
        if self.is_newest:
            self.attack(event)
        if event.kind == "step" and event.fields["version"] == self.version + 1 and self.until_step_s is None:
            self.until_step_s = event.wall_s - self.attack.wall_s


@dataclass
class Verdict:
    """Of a whole run. `problems`: all claims that do not hold."""

    closed: bool
    equal: bool
    foreign_tokens: int  # trained, but not as they were sampled in the undisturbed run
    problems: list[str]
    evaluated: int = 0  # versions
    superseded: int = 0  # skipped because a newer one was due
    replaced: int = 0  # by a newer one, because a kill took their weights
    superseded_undisturbed: int = 0


class Suite:
    """A configuration, and its run that nothing disturbs."""

    def __init__(self, name: str, directory: Path, steps: int, deadline_s: float) -> None:
        self.name, self._directory, self._deadline_s = name, directory, deadline_s
        directory.mkdir()
        self._has_agents = name in AGENTS_SUITES
        make = runs.make_start if name in SINGLE else make_agent_start if self._has_agents else make_start
        self._config_file = make(directory)
        self._overrides = [f"steps={steps}", *SUPERVISION[1:], *OVERRIDES.get(name, ())]
        if name in ENVIRONMENTS:
            self._overrides += [f"reward.path={directory}/acting.py:{ENVIRONMENTS[name]}"]
        if name in ("restored", "evaluated-agents"):
            self._overrides += [evaluation_of(directory)]
        if name == "from":
            parent = runs.train(self._config_file, directory / "parent", "steps=2")
            self._overrides += [f"model.path={parent.path}"]
        self._config = load(self._config_file, self._overrides)
        run = self.play("undisturbed", []).run
        self._weights, self._columns = weights(run), columns_of(run)
        self._evaluations = evaluations_of(run)

    def play(
        self, name: str, points: list[KillPoint], tell: Callable[[Kill], None] = lambda _: None
    ) -> PlayedRun:
        """A run to its end, or to its deadline. `tell` gets each kill."""
        agents = {} if self._has_agents else None
        run = ChildRun(self._config_file, self._directory / name, self._overrides, agents=agents)
        played = PlayedRun(run, self._directory, self._deadline_s, has_agents=agents is not None)
        try:
            played.play(points, tell)
        finally:
            run.end()
        if not points and played.problem:
            raise SystemExit(f"the undisturbed run: {played.problem}")
        return played

    def verdict(self, played: PlayedRun) -> Verdict:
        run = played.run
        if played.problem:
            return Verdict(False, False, 0, [played.problem])
        accounts = [one for one in check_ledger(run.directory.ledger, self._config) if not one.holds]
        columns = columns_of(run)
        foreign = sum(foreign_tokens(one, self._columns.get(tid)) for tid, one in columns.items())
        equal = weights(run) == self._weights
        problems = [f"{one.claim}: {one.detail}" for one in accounts]
        problems += [] if equal else ["other weights"]
        problems += [] if columns == self._columns else ["other trajectories"]
        problems += [f"{foreign} tokens that were not sampled so"] if foreign else []
        problems += [f"outlived their controller: {played.orphans}"] if played.orphans else []
        problems += [] if (served := check_served(run.events)).holds else [served.detail]
        problems += untrue_steps(run.events, columns)
        evaluations = evaluations_of(run)
        problems += untrue_evaluations(evaluations, self._evaluations)
        problems += [f"left behind: {left}"] if (left := remains(run)) else []
        done = sum(not reason for reason, _ in evaluations.values())
        skipped = num_skipped(evaluations), num_skipped(evaluations, REPLACED), num_skipped(self._evaluations)
        return Verdict(not accounts, equal, foreign, problems, done, *skipped)


def columns_of(run: ChildRun) -> dict[int, TokenColumns]:
    """The tokens that were trained, by trajectory."""
    with LedgerReader(run.directory.ledger) as reader:
        ids = [tid for step in reader.steps() for tid in step.trajectory_ids]
        return {tid: reader.trajectory(tid).columns for tid in ids}


def evaluation_of(directory: Path) -> str:
    """The override with an evaluation of four rows."""
    task = f'{{ kind = "function", path = "{directory}/acting.py:rows", answer = "none" }}'
    keys = "prompts = 4, samples = 1, correct_at = 1.5, share = 1.0"
    return f'evaluations=[{{ name = "{EVALUATION}", every = {EVERY}, {keys}, task = {task} }}]'


Evaluated = dict[int, tuple[str, list[tuple[list[int], float | None, str]]]]
"""By version: why it was skipped, and of each attempt its tokens, its reward and why it has none."""


def evaluations_of(run: ChildRun) -> Evaluated:
    with LedgerReader(run.directory.ledger) as reader:
        records = reader.evaluations()
        return {
            one.version: (
                one.reason,
                [
                    ([*each.tokens], each.reward, each.reason)
                    for each in (() if one.reason else reader.attempts(one.name, one.version))
                ],
            )
            for one in records
        }


def untrue_evaluations(evaluations: Evaluated, due: Evaluated) -> list[str]:
    """What differs from the undisturbed run. A version may be skipped because a newer one was due, or because
    a kill took its weights. Then a newer one is evaluated in its place."""
    missing = due.keys() - evaluations.keys()
    problems = [f"evaluated {[*evaluations]} of {[*due]}"] if missing else []
    done = [version for version, (reason, _) in evaluations.items() if not reason]
    for version, (reason, attempts) in evaluations.items():
        replaced = REPLACED in reason and max(done, default=-1) > version
        if reason and not reason.startswith(SUPERSEDED) and not replaced:
            problems.append(f"evaluation of version {version} skipped: {reason}")
        elif not reason and not due.get(version, ("none", []))[0] and attempts != due[version][1]:
            problems.append(f"evaluation of version {version} has other attempts")
    return problems


def num_skipped(evaluations: Evaluated, why: str = SUPERSEDED) -> int:
    return sum(why in reason for reason, _ in evaluations.values())


def remains(run: ChildRun) -> list[str]:
    """Processes of a run that has ended, and what is left of its episodes."""
    agents, snapshots = run.directory.path / AGENTS, run.directory.path / SNAPSHOTS
    left = [path for path in (agents, *snapshots.rglob("*")) if path.exists()]
    return [*(f"process {pid}" for pid in run.leftovers()), *map(str, left)]


def foreign_tokens(columns: TokenColumns, due: TokenColumns | None) -> int:
    """Sampled tokens of `columns` that differ from those of `due` in their id, log-prob or version."""
    rows = list(zip(columns.tokens, columns.logprobs, columns.versions(), strict=True))
    if due is None:
        return sum(count for _, count in columns.sampled_runs)
    true = list(zip(due.tokens, due.logprobs, due.versions(), strict=True))
    places = [at for start, stop, sampled in columns.turns() if sampled for at in range(start, stop)]
    return sum(at >= len(true) or rows[at] != true[at] for at in places)


def untrue_steps(events: Iterable[Event], columns: Mapping[int, TokenColumns]) -> list[str]:
    """Steps whose trainer saw other tokens than the ledger has, as their numbers or log-probs tell."""
    trained, problems = dict[int, int](), []
    for event in events:
        if event.kind == "step":
            trained[event.fields["version"]] = event.fields["trained_tokens"]
            gap = max((gap[1] for gap in event.fields["logprob_gap"].values()), default=0.0)
            problems += [f"log-probs differ by {gap:g}"] if gap > GAP_MAX else []
    recorded = sum(count for one in columns.values() for _, count in one.sampled_runs)
    if sum(trained.values()) != recorded:
        problems.append(f"{sum(trained.values())} tokens trained, {recorded} in the ledger")
    return problems


class PlayedRun:
    """A run with one kill in each of its first steps."""

    def __init__(self, run: ChildRun, directory: Path, deadline_s: float, *, has_agents: bool) -> None:
        self._has_agents = has_agents
        self.run, self.kills, self.orphans, self.problem = run, list[Kill](), list[int](), ""
        self._directory, self._deadline_s, self._turns = directory, deadline_s, OpenTurns()

    def play(self, points: list[KillPoint], tell: Callable[[Kill], None]) -> None:
        """Each step has its deadline, and with it each point."""
        for busy in self._directory.glob("busy-*"):  # of workers that an earlier run lost
            busy.unlink()
        try:
            self.run.start()
            for version, point in enumerate(points):
                self._kill_at(version, point, tell)
            self._go_on(lambda: False)
            if self.run.exit_code:
                raise WorkerError(f"exit code {self.run.exit_code}: {self.run.last_words()}")
        except MillraceError as error:
            self.problem = str(error)

    def _kill_at(self, version: int, point: KillPoint, tell: Callable[[Kill], None]) -> None:
        turns = self._turns
        self._go_on(
            lambda: turns.version > version or (turns.version == version and turns.events >= point.moment)
        )
        due_s = time.monotonic() + point.delay_s
        self._go_on(lambda: time.monotonic() >= due_s)
        self._go_on(lambda: turns.version > version or bool(self._victims(point.role)))
        victims = sorted(self._victims(point.role).items())
        if turns.version > version or not victims or self.run.exit_code is not None:
            return  # too late
        name, pid = victims[int(point.draw * len(victims))]
        for kill in self.kills:
            kill.is_newest = False
        attack = Attack(point.role, name, "kill", version, time.time())
        episodes = self._episodes(point.role, pid)
        self.orphans += self.run.kill(point.role, pid)
        self._take_in()
        if point.role == "reward worker" and not self._has_agents:
            episodes = self._answers(pid)  # that have not ended
        self.kills.append(Kill(point, attack, version, self._met(attack, episodes)))
        for event in self.run.events:
            self.kills[-1](event)
        tell(self.kills[-1])

    def _victims(self, role: str) -> dict[str, int]:
        """Processes of `role` that are in the middle of a turn. An agent: one that runs while a turn of any
        is."""
        pids = self.run.pids(role)
        match role:
            case "replica":
                return {name: pid for name, pid in pids.items() if name in self._turns.sampled.values()}
            case "reward worker":
                return {name: pid for name, pid in pids.items() if self._episodes(role, pid)}
            case _:
                return pids if len(self._turns) else {}

    def _episodes(self, role: str, pid: int) -> int:
        """Of a reward worker: answers of environments under way, or its agents. Of an agent that runs: 1."""
        if role not in ("reward worker", "agent"):
            return 0
        if not self._has_agents:
            return self._answers(pid)
        own = {pid} if role == "agent" else set(process.descendants(pid))
        return len(own & set(self.run.pids("agent").values()))

    def _answers(self, pid: int) -> int:
        return len(list(self._directory.glob(f"busy-{pid}-*")))

    def _met(self, attack: Attack, episodes: int) -> int:
        """How many turns under way the kill met. `episodes`: as of `_episodes`."""
        turns = open_turns(self.run.events, attack.wall_s)
        match attack.role:
            case "replica":
                return list(turns.sampled.values()).count(attack.name)
            case "reward worker" | "agent":
                return min(episodes, len(turns))
            case _:
                return len(turns)

    def _take_in(self) -> None:
        for event in self.run.poll():
            self._turns(event)
            for kill in self.kills:
                kill(event)

    def _go_on(self, until: Callable[[], bool]) -> None:
        """Watch the run until the condition holds, or the run has ended."""
        version, deadline_s = self._turns.version, time.monotonic() + self._deadline_s
        while not until():
            ended = self.run.exit_code is not None
            self._take_in()
            if ended:
                return
            if self._turns.version != version:
                version, deadline_s = self._turns.version, time.monotonic() + self._deadline_s
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"no step for {self._deadline_s:g} s after version {version}: {self.run.last_words()}"
                )
            time.sleep(POLL_S)
