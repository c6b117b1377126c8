"""How much a run waits for its environments and how much they write, and the episodes under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, ClassVar, NamedTuple

from millrace.core.events import Event
from millrace.core.types import Finish
from millrace.observe.conversation_times import ENVIRONMENT, MODEL


class EpisodeWait(NamedTuple):
    """`role`: who is to write next, the model or the environment."""

    since_wall_s: float
    trajectory_id: int
    role: str


@dataclass(slots=True)
class EpisodeWaits:
    """A sink. A wait for the model begins with the first lease of the trajectory, or with the answer of the
    environment. A wait for the environment begins with the end of a turn or with its own start, and ends with
    an answer or a reward. `plays`: some trajectory may have several turns."""

    plays: bool = False
    wall_s: float = 0.0  # of the newest event
    _waits: dict[int, tuple[float, int, str]] = field(default_factory=dict)  # fields of `EpisodeWait`

    def __call__(self, event: Event) -> None:
        self.wall_s = event.wall_s
        match event.kind:
            case "run_started" | "run_ended":
                self._waits.clear()
            case "leased":
                for trajectory_id in event.fields["trajectory_ids"]:
                    if trajectory_id not in self._waits:
                        self._begin(trajectory_id, MODEL)
            case "beginning":
                for trajectory_id in event.fields["trajectory_ids"]:
                    self._begin(trajectory_id, ENVIRONMENT)
            case "finished":
                self.plays |= event.fields.get("finish") == Finish.TURN
                self._begin(event.fields["trajectory_id"], ENVIRONMENT)
            case "observed":
                self.plays = True
                self._begin(event.fields["trajectory_id"], MODEL)
            case "scored" | "ended" | "restarted":
                self._waits.pop(event.fields["trajectory_id"], None)

    def _begin(self, trajectory_id: int, role: str) -> None:
        self._waits[trajectory_id] = self.wall_s, trajectory_id, role

    def count(self, role: str) -> int:
        return sum(mine == role for _, _, mine in self._waits.values())

    def longest_s(self, role: str, wall_s: float | None = None) -> float:
        """Of the longest wait until `wall_s`, by default until the newest event. 0: none waits."""
        until_s = self.wall_s if wall_s is None else wall_s
        begins = (since_s for since_s, _, mine in self._waits.values() if mine == role)
        return max(0.0, until_s - min(begins, default=until_s))

    def oldest(self, num: int) -> list[EpisodeWait]:
        """The `num` longest waits, the longest first."""
        return [EpisodeWait(*wait) for wait in nsmallest(num, self._waits.values())]


_OF_RUNS, _OF_TURNS = {"run_started", "run_ended", "report"}, {"leased", "finished", "observed", "scored"}


@dataclass
class EnvironmentUse:
    """A sink. An answer takes from the end of a turn until its observation is recorded: with the wait for a
    worker. The last answer of an episode is its score, and does not count here. A start takes until the first
    request of an agent, also if nobody waits for it yet; that of the first of a group is not seen."""

    kinds: ClassVar[frozenset[str]] = frozenset(_OF_RUNS | _OF_TURNS | {"beginning", "ended", "restarted"})

    num_answers: int = 0
    answer_s: float = 0.0  # of all answers
    num_starts: int = 0
    start_s: float = 0.0  # of all starts
    turn_s: float = 0.0  # from the lease to the end, of all complete turns
    observed_tokens: int = 0
    sampled_tokens: int = 0  # of complete turns
    reused_tokens: int = 0  # of earlier turns, whose keys and values were still there
    evicted_tokens: int = 0  # of turns whose keys and values made room
    waits: EpisodeWaits = field(default_factory=EpisodeWaits)
    _leased: dict[int, float] = field(default_factory=dict)
    _ended: dict[int, tuple[float, int]] = field(default_factory=dict)  # turns: when, tokens so far
    _begun: dict[int, int] = field(default_factory=dict)  # turns: tokens before them
    _beginning: dict[int, float] = field(default_factory=dict)  # starts: since when
    _loads: dict[str, tuple[int, int]] = field(default_factory=dict)  # of replicas: reused, evicted
    _step: tuple[Event, dict[str, float]] | None = None  # the newest, and its scalars

    def __call__(self, event: Event) -> None:
        self.waits(event)
        match event.kind:
            case "run_started":
                for turns in self._leased, self._ended, self._begun, self._beginning:
                    turns.clear()
            case "beginning":
                self._beginning |= dict.fromkeys(event.fields["trajectory_ids"], event.time_s)
            case "leased":
                for tid in event.fields["trajectory_ids"]:
                    self._leased.setdefault(tid, event.time_s)
            case "finished":
                tid, tokens = event.fields["trajectory_id"], event.fields["tokens"]
                self.sampled_tokens += tokens - self._begun.pop(tid, 0)
                self.turn_s += event.time_s - self._leased.pop(tid, event.time_s)
                self._ended[tid] = event.time_s, tokens
            case "report":
                self._reported(event.fields)
            case "observed":
                self._answered(event.fields, event.time_s)
            case "scored" | "ended" | "restarted":
                tid = event.fields["trajectory_id"]
                for turns in self._leased, self._ended, self._begun, self._beginning:
                    turns.pop(tid, None)

    def _reported(self, load: Mapping[str, Any]) -> None:
        """Counts of a replica begin again when it does."""
        before = self._loads.get(load["replica"], (0, 0))
        now = load.get("reused_tokens", 0), load.get("evicted_tokens", 0)
        self._loads[load["replica"]] = now
        began = (0, 0) if now < before or now[1] < before[1] else before
        self.reused_tokens += now[0] - began[0]
        self.evicted_tokens += now[1] - began[1]

    def _answered(self, fields: Mapping[str, Any], time_s: float) -> None:
        trajectory_id, tokens = fields["trajectory_id"], fields["tokens"]
        if (since_s := self._beginning.pop(trajectory_id, None)) is not None:
            self.num_starts += 1
            self.start_s += fields.get("start_s", time_s - since_s)
            self._begun[trajectory_id] = tokens
            return
        ended_s, before = self._ended.pop(trajectory_id, (time_s, 0))
        self.num_answers += 1
        self.answer_s += time_s - ended_s
        self.observed_tokens += tokens
        self._begun[trajectory_id] = before + tokens

    @property
    def num_waiting(self) -> int:
        """Complete turns that wait for an answer or a reward."""
        return len(self._ended)

    @property
    def mean_answer_s(self) -> float | None:
        return self.answer_s / self.num_answers if self.num_answers else None

    @property
    def observed_share(self) -> float:
        """The share of observed tokens of all tokens."""
        return self.observed_tokens / max(1, self.observed_tokens + self.sampled_tokens)

    @property
    def waiting_share(self) -> float | None:
        """The share of the time of complete turns and answers in which turns waited for answers."""
        total_s = self.answer_s + self.turn_s
        return self.answer_s / total_s if self.num_answers and total_s else None

    def scalars(self, step: Event) -> dict[str, float]:
        """Scalars of the time between this step and the one before it, for any number of sinks. Empty: no
        environment answered."""
        if self._step is None or self._step[0] is not step:
            self.waits.wall_s = step.wall_s
            self._step = step, self.take_scalars()
        return self._step[1]

    def take_scalars(self) -> dict[str, float]:
        if not self.num_answers:
            return {}
        scalars = {
            "environment/answers": float(self.num_answers),
            "environment/answer_s": self.answer_s / self.num_answers,
            "environment/observed_share": self.observed_share,
            "environment/waiting": float(self.num_waiting),
            "environment/waiting_s": self.waits.longest_s(ENVIRONMENT),
            "environment/model_waiting": float(self.waits.count(MODEL)),
            "environment/model_waiting_s": self.waits.longest_s(MODEL),
            "environment/reused_tokens": float(self.reused_tokens),
            "environment/evicted_tokens": float(self.evicted_tokens),
        }
        if self.num_starts:
            scalars["environment/start_s"] = self.start_s / self.num_starts
        self.num_starts, self.start_s = 0, 0.0
        self.num_answers = self.observed_tokens = self.sampled_tokens = 0
        self.reused_tokens = self.evicted_tokens = 0
        self.answer_s = self.turn_s = 0.0
        return scalars
