"""Totals of each replica across its incarnations, whose counters start again at 0, and of each host."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from millrace.core.events import Event


@dataclass(slots=True)
class ReplicaHistory:
    """One replica. `before_*` sum the counters of incarnations that are gone."""

    latest: dict[str, Any] = field(default_factory=dict)  # fields of the newest report
    incarnations: int = 0
    alive: bool = False
    left: bool = False
    pulls: int = 0
    pull_s: float = 0.0  # of all pulls
    swap_s_max: float | None = None
    moved_away: int = 0
    before_tokens: int = 0
    before_drafts: tuple[int, int] = (0, 0)
    before_busy_s: float = 0.0
    before_idle_s: float = 0.0

    @property
    def generated_tokens(self) -> int:
        return self.before_tokens + self.latest.get("generated_tokens", 0)

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafted tokens, and those that were right."""
        now = self.latest.get("drafted_tokens", 0), self.latest.get("accepted_tokens", 0)
        return self.before_drafts[0] + now[0], self.before_drafts[1] + now[1]

    @property
    def busy_s(self) -> float:
        return self.before_busy_s + self.latest.get("busy_s", 0.0)

    @property
    def idle_s(self) -> float:
        return self.before_idle_s + self.latest.get("idle_s", 0.0)

    @property
    def idle_fraction(self) -> float | None:
        total_s = self.busy_s + self.idle_s
        return self.idle_s / total_s if total_s > 0 else None

    def begin(self) -> None:
        """A new incarnation: its counters start at 0."""
        self.before_tokens, self.before_busy_s = self.generated_tokens, self.busy_s
        self.before_drafts = self.drafts
        self.before_idle_s, self.latest = self.idle_s, {}
        self.incarnations += 1
        self.alive = True


class ReplicaTotals:
    """A sink: the histories of all replicas, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, ReplicaHistory] = {}

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "worker_started" if fields["role"] == "replica":
                self._of(fields["name"]).begin()
            case "worker_died" if fields["role"] == "replica":
                self._of(fields["name"]).alive = False
            case "left":
                self._of(fields["replica"]).left = True
            case "report":
                self._of(fields["replica"]).latest = fields
            case "pulled":
                history = self._of(fields["replica"])
                history.pulls += 1
                history.pull_s += fields["pull_s"]
                history.swap_s_max = max(history.swap_s_max or 0.0, fields["swap_s"])
            case "moved":
                self._of(fields["source"]).moved_away += len(fields["trajectories"])

    @property
    def generated_tokens(self) -> int:
        return sum(history.generated_tokens for history in self.by_name.values())

    @property
    def right_drafts(self) -> float | None:
        """The share of drafted tokens that were right; None: none was drafted."""
        drafts = [history.drafts for history in self.by_name.values()]
        drafted = sum(num for num, _ in drafts)
        return sum(right for _, right in drafts) / drafted if drafted else None

    @property
    def idle_fraction(self) -> float | None:
        """The idle time of all replicas over their busy and idle time."""
        idle_s = sum(history.idle_s for history in self.by_name.values())
        total_s = idle_s + sum(history.busy_s for history in self.by_name.values())
        return idle_s / total_s if total_s > 0 else None

    def details(self) -> dict[str, dict[str, Any]]:
        return {name: _detail(history) for name, history in sorted(self.by_name.items())}

    def _of(self, name: str) -> ReplicaHistory:
        return self.by_name.setdefault(name, ReplicaHistory())


def _detail(history: ReplicaHistory) -> dict[str, Any]:
    return {
        "incarnations": history.incarnations,
        "version": history.latest.get("version"),
        "generated_tokens": history.generated_tokens,
        "drafted_tokens": history.drafts[0],
        "accepted_tokens": history.drafts[1],
        "busy_s": history.busy_s,
        "idle_s": history.idle_s,
        "idle_fraction": history.idle_fraction,
        "pulls": history.pulls,
        "pull_s_mean": history.pull_s / history.pulls if history.pulls else None,
        "swap_s_max": history.swap_s_max,
        "trajectories_moved_away": history.moved_away,
    }


@dataclass(slots=True)
class HostTotals:
    """One host. `seconds` has the time of each version. `received_s` is the time of those from the
    network."""

    version: int = -1
    source: str = ""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    received_bytes: int = 0
    received_s: float = 0.0
    misses: int = 0
    missed_because: str = ""

    def as_json(self) -> dict[str, Any]:
        """As JSON types. What never happened is None."""
        return {
            "version": self.version if self.version >= 0 else None,
            "from": self.source or None,
            "fetch_s": median(self.seconds) if self.seconds else None,
            "mb_per_s": self.received_bytes / self.received_s / 1e6 if self.received_s > 0 else None,
            "misses": self.misses,
            "last_miss": self.missed_because or None,
        }


@dataclass(slots=True)
class Hosts:
    """A sink. `by_host` has the hosts that fetch; the trainer's host does not fetch."""

    by_host: dict[str, HostTotals] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "fetched":
                host = self.by_host.setdefault(fields["host"], HostTotals())
                host.version, host.missed_because = fields["version"], ""
                host.seconds.append(fields["fetch_s"])
                if fields["received_bytes"]:
                    host.source = fields["source"]
                    host.received_bytes += fields["received_bytes"]
                    host.received_s += fields["fetch_s"]
            case "fetch_missed":
                host = self.by_host.setdefault(fields["host"], HostTotals())
                host.misses, host.missed_because = host.misses + 1, fields["reason"]

    def as_json(self) -> dict[str, dict[str, Any]]:
        return {name: host.as_json() for name, host in self.by_host.items()}
