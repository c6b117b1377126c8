"""The manifest of a checkpoint: which trainer wrote it, its version, and the size and digest of every other
file. It is written last. Names no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import xxhash

from millrace.core.errors import DataError
from millrace.core.progress import count

NAME = "manifest.json"
TORCH, JAX = 1, "jax 1"
READ_BYTES = 1 << 22
FILE_BYTES_MAX = 4 * 10**9  # of a file of tensors
EARLIER = (
    "  Delete this directory, then `millrace train --resume`: the run goes back to the checkpoint before it "
    "(or to the start) and does the steps since then again"
)


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: str  # XXH3-128


class CheckpointManifest(msgspec.Struct, frozen=True):
    """`format`: TORCH or JAX. `files`: by path in the checkpoint."""

    format: int | str
    version: int
    files: dict[str, FileDigest]


def directory_name(version: int) -> str:
    return f"v{version:08d}"


def file_names(stem: str, count: int) -> list[str]:
    """The names of `count` files, as Hugging Face names the files of a model."""
    if count < 2:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def describe(file: Path) -> FileDigest:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            count(len(chunk))
    return FileDigest(file.stat().st_size, digest.hexdigest())


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    (path / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(path: Path) -> CheckpointManifest:
    """Raises: DataError: `path` is not a complete checkpoint, or one of another version."""
    try:
        manifest = msgspec.json.decode((path / NAME).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a complete checkpoint: its {NAME}: {error}\n{EARLIER}") from error
    if path.name != directory_name(manifest.version):
        raise DataError(f"{path} is damaged: its {NAME} is of version {manifest.version}.\n{EARLIER}")
    return manifest


def refuse_another_format(path: Path, manifest: CheckpointManifest, read: int | str) -> None:
    """Raises: DataError: the checkpoint has another format than `read`."""
    if manifest.format != read:
        advice = (
            ""
            if manifest.format not in (TORCH, JAX)
            else ("\n  `millrace convert` rewrites a checkpoint of one trainer for the other")
        )
        raise DataError(
            f"{path} has checkpoint format {manifest.format!r}, this trainer reads {read!r}{advice}"
        )


def refuse_damaged(path: Path, manifest: CheckpointManifest, names: Collection[str]) -> None:
    """Raises: DataError: one of the files `names` is not as its manifest says."""
    for name in names:
        file, expected = path / name, manifest.files[name]
        described = describe(file) if file.is_file() else None
        if described != expected:
            raise DataError(f"{file} is damaged: expected {expected}, found {described}.\n{EARLIER}")
