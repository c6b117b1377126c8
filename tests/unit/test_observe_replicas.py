"""What each host got, in words and numbers."""

from __future__ import annotations

from typing import Any

from millrace.core.events import Event
from millrace.observe.replica_times import Hosts


def event(kind: str, **fields: Any) -> Event:
    return Event(kind, 0.0, 0.0, fields)


def test_a_host_is_told_with_its_rate_and_its_source() -> None:
    hosts = Hosts()
    hosts(event("fetch_missed", host="b", version=1, reason="nobody answers"))
    assert hosts.as_json()["b"]["last_miss"] == "nobody answers" and hosts.as_json()["b"]["version"] is None
    for version, fetch_s in ((1, 1.0), (2, 3.0)):
        fields = {"source": "a:1", "received_bytes": 4_000_000, "fetch_s": fetch_s, "digest": "d"}
        hosts(event("fetched", host="b", version=version, **fields))
    assert hosts.as_json() == {
        "b": {"version": 2, "from": "a:1", "fetch_s": 2.0, "mb_per_s": 2.0, "misses": 1, "last_miss": None}
    }


def test_what_was_here_already_counts_for_no_rate() -> None:
    hosts = Hosts()
    hosts(event("fetched", host="b", version=1, source="", received_bytes=0, fetch_s=0.0, digest="d"))
    assert hosts.as_json()["b"]["mb_per_s"] is None and hosts.as_json()["b"]["version"] == 1
