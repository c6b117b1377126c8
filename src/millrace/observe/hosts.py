"""The versions that each host got from relays of other hosts, from the events `fetched` and
`fetch_missed`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from millrace.core.events import Event


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
