"""What `snapshot()` of environments gave, so that another process restores an episode whose process is lost.

A snapshot is written before its observation leaves the worker. The ledger records the observation before the
next turn begins, so until then the answer may be given again, from the snapshot before. A trajectory has the
files of its last two turns in a directory of its own, below that of its stream. A digest binds each to the
stream, the prompt, the row, and the tokens that the model has seen.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.completion.columns import token_array
from millrace.core.errors import writing
from millrace.core.types import ScoreRequest
from millrace.tasks.rows import Row

DIRECTORY = "snapshots"
TRAINING = "training"
DIGEST_BYTES = 32
KEY_BYTES = 8
PART = ".part"


class RecoveryError(Exception):
    """An episode whose process is lost cannot go on."""


class EpisodeSnapshot(msgspec.Struct, frozen=True):
    """An episode after an answer: its reward until then, also by name. `data`: what `snapshot()` of the
    environment returned. `before`: as in `Episode`."""

    turns: int
    reward: float
    rewards: dict[str, float]
    data: bytes
    before: str | list[dict[str, Any]] = []


class Snapshots:
    """Of one worker. `stream`: who asks: the ids of two streams may be equal. `run_dir` None, or not on this
    host: they are kept in this process, which is enough for a trial."""

    def __init__(self, run_dir: Path | None, bytes_max: int, stream: str = TRAINING) -> None:
        self._bytes_max, self._stream = bytes_max, stream
        self._directory = None if run_dir is None or not run_dir.is_dir() else run_dir / DIRECTORY / stream
        self._here: dict[int, dict[str, bytes]] = {}  # by trajectory

    def keep(self, request: ScoreRequest, row: Row, observed: list[int], snapshot: EpisodeSnapshot) -> None:
        """`observed`: the ids of the answer. Raises: RecoveryError: it is too large. StorageError: it cannot
        be written."""
        if not isinstance(snapshot.data, bytes):
            raise RecoveryError(f"`snapshot` returned a {type(snapshot.data).__name__}: bytes")
        if (size := len(snapshot.data)) > self._bytes_max:
            raise RecoveryError(
                f"its snapshot has {size:,} bytes, more than `reward.snapshot_bytes` ({self._bytes_max:,})"
            )
        packed, key = msgspec.msgpack.encode(snapshot), self._key(request, row)
        name = _name(key, snapshot.turns)
        data = _digest(key, [*request.tokens, *observed], packed) + packed
        if self._directory is None:
            self._here.setdefault(request.trajectory_id, {})[name] = data
            return
        path = self._directory / str(request.trajectory_id) / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PART, delete=False) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)

    def find(self, request: ScoreRequest, row: Row, turns: int) -> EpisodeSnapshot:
        """The snapshot after so many turns. Raises: RecoveryError: it is lost or broken."""
        trajectory_id, key = request.trajectory_id, self._key(request, row)
        name = _name(key, turns)
        try:
            if self._directory is None:
                data = self._here[trajectory_id][name]
            else:
                data = (self._directory / str(trajectory_id) / name).read_bytes()
        except (KeyError, OSError):
            raise RecoveryError(
                f"the snapshot after turn {turns} of trajectory {trajectory_id} ({self._stream}) is lost, or "
                "its row is another one now"
            ) from None
        packed = data[DIGEST_BYTES:]
        if data[:DIGEST_BYTES] != _digest(key, request.tokens[: request.turns[-1][0]], packed):
            raise RecoveryError(f"the snapshot after turn {turns} is broken, or of another episode")
        return msgspec.msgpack.decode(packed, type=EpisodeSnapshot)

    def forget(self, trajectory_ids: Iterable[int]) -> None:
        """These trajectories have ended, or begin again."""
        for trajectory_id in trajectory_ids:
            self._here.pop(trajectory_id, None)
            if self._directory is not None:
                _remove(self._directory / str(trajectory_id))

    def _key(self, request: ScoreRequest, row: Row) -> bytes:
        """Of the stream, the trajectory, the prompt and the row."""
        what = self._stream, request.trajectory_id, request.group_id, list(request.prompt)
        text = json.dumps([*what, row], default=_plain, skipkeys=True)
        return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def stream_of(evaluation: str) -> str:
    """The stream of an evaluation. None has the name of training."""
    return f"evaluation-{evaluation}"


def sweep(run_dir: Path, goes_on: Callable[[int], bool]) -> None:
    """Remove what workers that were killed have left. Only trajectories of training go on from a snapshot
    after their controller has ended."""
    directory = run_dir / DIRECTORY
    for stream in directory.glob("*"):
        for path in stream.glob("*") if stream.name == TRAINING and not stream.is_symlink() else ():
            if not (path.name.isdecimal() and goes_on(int(path.name))):
                _remove(path)
            for part in path.glob(f"*{PART}"):
                _remove(part)
        if stream.name != TRAINING:
            _remove(stream)
    with suppress(OSError):  # others go on
        (directory / TRAINING).rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """What stands for a value that JSON has not: the same in each process."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)


def _name(key: bytes, turns: int) -> str:
    """Of the last two turns, each has a name of its own."""
    return f"{key.hex()}.{turns % 2}"


def _digest(key: bytes, tokens: Iterable[int], packed: Any) -> bytes:
    return blake2b(key + token_array(tokens).tobytes() + packed, digest_size=DIGEST_BYTES).digest()
