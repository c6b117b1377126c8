"""The episodes that have waited longest, with their turns. A query reads only those trajectories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.ledger.reading.reader import LedgerReader
from millrace.observe.conversation import MODEL
from millrace.observe.episode_waits import EpisodeWait
from millrace.run_directory.run_directory import RunDirectory

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
