"""A real run with `weights.directory`: what it stored is what it served, and a cold host can have it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.runs import events, train

from millrace.weights.relay import RelayWorker
from millrace.weights.store.directory import Directory


def test_a_run_stores_versions_that_a_cold_relay_reads(start: Path, warm: None, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/weights"
    run = train(start, tmp_path / "run", f"weights.directory={url}", "weights.anchor_every=2")
    stored = {event.fields["version"]: event.fields for event in events(run, "stored")}
    staged = {event.fields["version"]: event.fields["digest"] for event in events(run, "staged")}
    entries = Directory(url).entries()
    assert stored and not events(run, "store_missed")
    assert max(stored) in entries and entries.keys() <= staged.keys(), "old versions are removed"
    assert (tmp_path / "weights" / "owner").read_text().startswith("run-")
    newest = max(entries)
    cold = RelayWorker("cold", 2)
    asyncio.run(cold.open(entries[newest].num_bytes))
    got = asyncio.run(cold.fetch(newest, staged[newest], [url]))
    assert (got.digest, got.versions) == (staged[newest], [newest])
