"""The events of a run, read while the log grows: sums, troubles, evidence, timeline, episodes that wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.schema import Config
from millrace.core.errors import DataError, boundary
from millrace.core.events import Event
from millrace.diagnose.examine import evidence_of
from millrace.ledger.reading import LedgerReader
from millrace.observe.conversation_times import MODEL
from millrace.observe.environment_use import EpisodeWait
from millrace.observe.sinks.jsonl import event_of
from millrace.observe.sinks.log_files import SLICE_BYTES, Tail
from millrace.observe.summary import Summary
from millrace.observe.timeline import records_of
from millrace.run_directory.run_directory import RunDirectory


@dataclass(slots=True)
class TimelineBar:
    """Work of a role from `start` to `end`, in minutes since the first event. Of that time `share` was work.
    `kind` is the kind of the event that reported the work."""

    row: str
    kind: str
    start: float
    end: float
    label: str
    share: float = 1.0


class Activity:
    """How busy replicas were, in quarters: the newest spans. Equal neighbours are joined."""

    def __init__(self, spans_max: int) -> None:
        self.spans: deque[TimelineBar] = deque(maxlen=spans_max)
        self._newest: dict[str, TimelineBar] = {}

    def add(self, replica: str, start: float, end: float, share: float) -> None:
        share = round(4 * share) / 4
        last = self._newest.get(replica)
        if last is not None and last.share == share and last.end == start:
            last.end = end
            return
        self._newest[replica] = TimelineBar(replica, "report", start, end, f"decodes {share:.0%}", share)
        self.spans.append(self._newest[replica])


def row_order(row: str) -> tuple[int, int, str]:
    """Sorts rows: the trainer, the relays, then replicas by number."""
    first = {"trainer": 0, "relay": 1, "controller": 2}.get(row.partition("-")[0], 3)
    digits = row.rpartition("-")[2]
    return first, int(digits) if digits.isdigit() else 0, row


SPANS_MAX = 1500
"""The newest spans of the timeline, and as many spans of replicas."""
TROUBLES_MAX = 100

_PLENTIFUL = tuple(
    f'{{"kind":"{kind}"'.encode()
    for kind in ("admitted", "beginning", "leased", "finished", "observed", "ended")
)
_SCORED, _WELL = b'{"kind":"scored"', b'"outcome":"scored"'
_TROUBLES = {
    "worker_died": "{cause}",
    "worker_recovered": "back after {recovery_s:.2f} s",
    "stalled": "no progress for {quiet_s:.0f} s",
    "quarantined": "row {row_id} is set aside: {reason}",
    "step_rejected": "batch of version {version} refused: {reason}",
    "rewound": "went back to version {version}",
    "replay_differs": "version {version} came out different: {reason}",
    "stage_missed": "version {version} was not staged: {reason}",
    "fetch_missed": "version {version} did not get to host {host}: {reason}",
    "version_dropped": "version {version} can be read no more on host {host}: {reason}",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    minute: float
    who: str
    what: str


class Story:
    """A run's events so far. `update` reads the next events, a bounded number of bytes."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path, self._config = path, config
        self._acts = config.reward.kind == "environment"
        self._begin()

    def _begin(self) -> None:
        self.is_new = True  # something was read since a reader of the story set it to False
        self._tail = Tail(self._path)
        self._damage = ""  # the message of every later `update`
        self._summary, self.evidence = Summary(), evidence_of(self._config)
        self._load: dict[str, tuple[float, float, float]] = {}  # replica -> minute, busy and idle seconds
        self._start_s: float | None = None
        self.spans: deque[TimelineBar] = deque(maxlen=SPANS_MAX)
        self.activity = Activity(SPANS_MAX)
        self.evaluations: dict[tuple[str, int], dict[str, Any]] = {}  # the newest event of each key
        self.troubles: deque[Trouble] = deque(maxlen=TROUBLES_MAX)
        self.took_s = {"step": 0.0, "wait": 0.0, "publish": 0.0, "checkpoint": 0.0}  # of the trainer

    def update(self, bytes_max: int = SLICE_BYTES) -> bool:
        """Returns whether it read anything. Raises DataError: a line is damaged, or lacks a field."""
        if self._tail.is_lost:
            self._begin()  # another run took its place, or a part was condensed
        if self._damage:
            raise DataError(self._damage)
        lines = self._tail.take(bytes_max)
        self.is_new |= bool(lines)
        try:
            self._read(lines)
        except DataError as error:
            self._damage = str(error)
            raise
        return bool(lines)

    def _read(self, lines: list[bytes]) -> None:
        for line in lines:
            if self._skips(line):
                continue
            event = event_of(line, str(self._path))
            with boundary(str(self._path), f"not a whole {event.kind!r} event", DataError):
                self._take(event)

    def _skips(self, line: bytes) -> bool:
        """None of an episode: the doctor measures how long turns wait for answers."""
        scored_well = line.startswith(_SCORED) and _WELL in line
        if self._acts or not (scored_well or line.startswith(_PLENTIFUL)):
            return False
        self.evidence.outcomes["scored"] += scored_well
        return True

    @property
    def share_read(self) -> float:
        """The share of the files that is read, from 0 to 1."""
        return 1 - self._tail.behind_bytes / size if (size := self._tail.size) else 1.0

    @property
    def behind_bytes(self) -> int:
        return self._tail.behind_bytes

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`, as of the events that are read."""
        return self._summary.result()

    def _take(self, event: Event) -> None:
        self._summary(event)
        self.evidence(event)
        self._start_s = self._start_s or event.wall_s
        minute = (event.wall_s - self._start_s) / 60
        for row, record in records_of(event, minute * 60e6):
            if record["ph"] == "X":
                start = record["ts"] / 60e6
                self.spans.append(TimelineBar(row, event.kind, max(0.0, start), minute, record["name"]))
        if event.kind in ("evaluated", "evaluation_skipped"):
            self.evaluations[event.fields["name"], event.fields["version"]] = event.fields
        if event.kind == "rewound":
            version = event.fields["version"]
            self.evaluations = {key: fields for key, fields in self.evaluations.items() if key[1] <= version}
        if event.kind == "report":
            self._report(minute, event.fields)
        if event.kind in _TROUBLES:
            who = event.fields.get("name", "controller")
            self.troubles.append(Trouble(minute, who, _TROUBLES[event.kind].format(**event.fields)))
        self._count_trainer(event)

    def _count_trainer(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "step":
                self.took_s["step"] += fields["step_s"]
                self.took_s["wait"] += fields["wait_s"]
            case "published":
                self.took_s["publish"] += fields["stall_s"]
            case "checkpoint":
                self.took_s["checkpoint"] += fields.get("stall_s", fields["save_s"])

    def _report(self, minute: float, load: dict[str, Any]) -> None:
        """How busy a replica was since its previous report."""
        name, busy, idle = load["replica"], load["busy_s"], load["idle_s"]
        before = self._load.get(name)
        self._load[name] = minute, busy, idle
        if before is None or busy < before[1] or (total := busy - before[1] + idle - before[2]) <= 0:
            return
        self.activity.add(name, before[0], minute, (busy - before[1]) / total)


SHOWN_MAX = 20
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class WaitingEpisode:
    """`turn` is under way, or complete and not answered. `tokens` so far, without the prompt. Both are of the
    last flush of the ledger."""

    trajectory_id: int
    role: str
    waited_s: float
    turn: int
    tokens: int


def waiting_episodes(run: RunDirectory, waits: Sequence[EpisodeWait], wall_s: float) -> list[WaitingEpisode]:
    """Without trajectories that have ended. Raises LedgerError: the ledger is damaged, or too slow."""
    until_s = time.monotonic() + LOOK_S
    with LedgerReader(run.ledger, check=False, stop=lambda: time.monotonic() > until_s) as reader:
        return [
            episode
            for wait in waits
            if (episode := _episode(reader, wait, max(0.0, wall_s - wait.since_wall_s))) is not None
        ]


def _episode(reader: LedgerReader, wait: EpisodeWait, waited_s: float) -> WaitingEpisode | None:
    one = reader.find(wait.trajectory_id)
    if one is None or not one.live:
        return None
    stretches = [sampled for _, _, sampled in one.columns.turns()]
    begun = bool(stretches) and stretches[-1]
    turn = sum(stretches) + (wait.role == MODEL and not begun)
    return WaitingEpisode(one.trajectory_id, wait.role, waited_s, turn, len(one.columns))
