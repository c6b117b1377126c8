"""What `snapshot()` of environments gave, so that another process restores an episode whose process is lost.

A snapshot is written before its observation leaves the worker. The ledger records the observation before the
next turn begins, so until then the answer may be given again, from the snapshot before. A trajectory has the
files of its last two turns. A digest binds each to the tokens that the model has seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.completion.columns import token_array
from millrace.core.errors import writing

DIRECTORY = "snapshots"
DIGEST_BYTES = 32


class RecoveryError(Exception):
    """An episode whose process is lost cannot go on."""


class EpisodeSnapshot(msgspec.Struct, frozen=True):
    """An episode after an answer: its reward until then, also by name. `data`: what `snapshot()` of the
    environment returned."""

    turns: int
    reward: float
    rewards: dict[str, float]
    data: bytes


class Snapshots:
    """`run_dir` None, or not on this host: they are kept in this process, which is enough for a trial."""

    def __init__(self, run_dir: Path | None, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._directory = None if run_dir is None or not run_dir.is_dir() else run_dir / DIRECTORY
        self._here: dict[str, bytes] = {}

    def keep(self, trajectory_id: int, tokens: Sequence[int], snapshot: EpisodeSnapshot) -> None:
        """`tokens`: of the trajectory, with the last observation. Raises: RecoveryError: it is too large.
        StorageError: it cannot be written."""
        if not isinstance(snapshot.data, bytes):
            raise RecoveryError(f"`snapshot` returned a {type(snapshot.data).__name__}: bytes")
        if (size := len(snapshot.data)) > self._bytes_max:
            raise RecoveryError(
                f"its snapshot has {size:,} bytes, more than `reward.snapshot_bytes` ({self._bytes_max:,})"
            )
        packed = msgspec.msgpack.encode(snapshot)
        name, data = _name(trajectory_id, snapshot.turns), _digest(tokens, packed) + packed
        if self._directory is None:
            self._here[name] = data
            return
        path, part = self._directory / name, self._directory / f"{name}.part"
        with writing(path):
            self._directory.mkdir(exist_ok=True)
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)

    def find(self, trajectory_id: int, tokens: Sequence[int], turns: int) -> EpisodeSnapshot:
        """The snapshot after so many turns. Raises: RecoveryError: it is lost or broken."""
        name = _name(trajectory_id, turns)
        try:
            data = self._here[name] if self._directory is None else (self._directory / name).read_bytes()
        except (KeyError, OSError):
            raise RecoveryError(f"the snapshot after turn {turns} is lost") from None
        packed = data[DIGEST_BYTES:]
        if data[:DIGEST_BYTES] != _digest(tokens, packed):
            raise RecoveryError(f"the snapshot after turn {turns} is broken, or of another episode")
        return msgspec.msgpack.decode(packed, type=EpisodeSnapshot)

    def forget(self, trajectory_ids: Iterable[int]) -> None:
        """These trajectories have ended."""
        for name in (_name(trajectory_id, turns) for trajectory_id in trajectory_ids for turns in (0, 1)):
            self._here.pop(name, None)
            if self._directory is not None:
                with suppress(OSError):
                    (self._directory / name).unlink(missing_ok=True)


def sweep(run_dir: Path, has_ended: Callable[[int], bool]) -> None:
    """Remove what a killed run left of trajectories that have ended, and half a file."""
    for path in (run_dir / DIRECTORY).glob("*.*"):
        trajectory_id = path.name.partition(".")[0]
        if path.suffix == ".part" or (trajectory_id.isdecimal() and has_ended(int(trajectory_id))):
            path.unlink(missing_ok=True)


def _name(trajectory_id: int, turns: int) -> str:
    """Of the last two turns, each has a name of its own."""
    return f"{trajectory_id}.{turns % 2}"


def _digest(tokens: Sequence[int], packed: Any) -> bytes:
    return blake2b(token_array(tokens).tobytes() + packed, digest_size=DIGEST_BYTES).digest()
