"""Seeded changes of a run's files while the run is stopped."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.run_directory.run_directory import RunDirectory

SAFETENSORS_HEADER_BYTES = 8  # the length of the JSON that follows, little-endian


@dataclass(frozen=True)
class StoppedRun:
    """A run whose controller was killed, and the files that the run reads. `outside` belongs to nobody in the
    run."""

    run: RunDirectory
    model: Path
    rows: Path | None
    outside: Path

    @property
    def write_ahead_log(self) -> Path:
        return Path(f"{self.run.ledger}-wal")


Tampering = Callable[[StoppedRun, random.Random], Path | None]
"""Changes a file and returns its path; None: there was nothing to change."""


def flip_a_ledger_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    return _flip(stopped.run.ledger, rng)


def flip_a_log_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    return _flip(stopped.write_ahead_log, rng)


def delete_the_log(stopped: StoppedRun, rng: random.Random) -> Path | None:
    file = stopped.write_ahead_log
    if not file.exists() or not file.stat().st_size:
        return None
    file.unlink()
    return file


def halve_the_log(stopped: StoppedRun, rng: random.Random) -> Path | None:
    file = stopped.write_ahead_log
    if not file.exists() or not file.stat().st_size:
        return None
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


def flip_a_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """In the configuration, the events, the ledger's mark or a checkpoint, which a resume reads."""
    mark = Path(f"{stopped.run.ledger}.mark")
    paths = [stopped.run.config, stopped.run.events, mark, *stopped.run.checkpoints.rglob("*.*")]
    files = sorted(path for path in paths if path.is_file())
    return _flip(rng.choice(files), rng) if files else None


def replace_the_model(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """Change every number a little: the file is whole, has the same size, and is another model."""
    file = stopped.model / "model.safetensors"
    if not file.exists():
        return None
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:SAFETENSORS_HEADER_BYTES], "little")
    start = SAFETENSORS_HEADER_BYTES + header
    data[start::4] = bytes(byte ^ 0x7F for byte in data[start::4])  # low bits, in float32 and bfloat16 alike
    file.write_bytes(data)
    return file


def replace_the_rows(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """The same lines in another order."""
    if stopped.rows is None:
        return None
    stopped.rows.write_text(
        "\n".join(reversed(stopped.rows.read_text().removesuffix("\n").split("\n"))) + "\n"
    )
    return stopped.rows


def leave_half_a_checkpoint(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """The state after a trainer died while it saved."""
    left = stopped.run.checkpoints / f".v{rng.randint(1, 8):08d}.building"
    left.mkdir(parents=True, exist_ok=True)
    (left / "model.safetensors").write_bytes(rng.randbytes(1000))
    return left


def plant_a_link(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """Move a file or directory of the run outside, and put a link in its place."""
    run = stopped.run
    places = [run.config, run.events, run.metrics, run.summary, run.checkpoints, run.logs, run.ledger]
    place = rng.choice([path for path in places if path.exists()])
    target = stopped.outside / place.name
    shutil.move(place, target)
    place.symlink_to(target)
    return place


def move_the_directory(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """`sessions` moves the directory, while the run goes on. Between two sessions a move is allowed."""
    return None


KINDS: dict[str, Tampering] = {
    "ledger bit": flip_a_ledger_bit,
    "log bit": flip_a_log_bit,
    "log deleted": delete_the_log,
    "log halved": halve_the_log,
    "other bit": flip_a_bit,
    "model replaced": replace_the_model,
    "rows replaced": replace_the_rows,
    "half a checkpoint": leave_half_a_checkpoint,
    "link planted": plant_a_link,
    "moved in the run": move_the_directory,
}


def tree_digest(directory: Path) -> str:
    """A digest of the names and bytes of all files."""
    digest = hashlib.blake2b()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(directory)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _flip(file: Path, rng: random.Random) -> Path | None:
    if not file.exists() or not file.stat().st_size:
        return None
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return file
