"""Reward workers of a real run: one more starts when completions wait, and ends when none do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.config.load import load
from millrace.controller.fleet import live_reward_workers
from millrace.core.events import Event
from millrace.run import compose
from millrace.run_directory import run_directory

SLOW_AT_FIRST = """
import time
from pathlib import Path

SECOND = Path(__file__).with_name("second")


def reward(completion):
    time.sleep(0 if SECOND.exists() else 0.1)
    return float(len(completion))
"""


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.usefixtures("warm")
def test_a_reward_worker_starts_when_completions_wait_and_ends_when_none_do(start, tmp_path, monkeypatch):
    monkeypatch.setattr(live_reward_workers, "QUIET_S", 1.0)
    (tmp_path / "score.py").write_text(SLOW_AT_FIRST)
    reward = f"reward={{kind='function', path='{tmp_path / 'score.py'}:reward', workers=1, workers_max=2}}"
    stop, second, changes = asyncio.Event(), list[int](), list[Event]()

    def watch(event: Event) -> None:
        if event.kind == "reward_workers":
            changes.append(event)
        elif event.kind == "worker_started" and event.fields["name"] == "reward-worker-1":
            second.append(event.fields["pid"])
            (tmp_path / "second").touch()
        elif event.kind == "step" and changes and changes[-1].fields["workers"] == 1 and ended(second):
            stop.set()

    config = load(start, [reward, "batch.prompts=8", "steps=1000", "checkpoints.every=1000"])
    asyncio.run(compose.train(config, run_directory.create("run", tmp_path / "run"), stop, watch))
    assert stop.is_set() and second
    counts = [(change.fields["before"], change.fields["workers"]) for change in changes]
    assert counts[:2] == [(1, 2), (2, 1)] and changes[0].fields["waiting"], "the queue is why"
