"""A version as a file that servers load, in a directory that both hosts see under one path.

The replica that comes first writes the file, the others find it. A shared lock says that a replica still
needs the file; the lock goes with its process, however that ends. Files of older versions without such a
lock are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from millrace.core.digest import NamedBuffer
from millrace.core.errors import UnknownVersionError, WeightsError, writing
from millrace.core.protocols import WeightsReader

FILE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Handover:
    """One replica's view of `directory`. It needs one version at a time.

    `with_head`: the server has a head of its own where the model's is tied to its embedding.
    """

    def __init__(self, directory: Path, *, with_head: bool) -> None:
        self._directory, self._with_head = directory.absolute(), with_head
        self._held: int | None = None  # a file descriptor
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)

    def hold(self, version: int, digest: str, reader: WeightsReader) -> Path:
        """A directory with `version` in it, which stays until the next call, or `close`.

        Raises: UnknownVersionError, TornVersionError; StorageError."""
        own = "-own-head" if self._with_head else ""
        place = self._directory / f"v{version:08d}-{digest}{own}"
        with writing(place), self._alone():
            if not (place / FILE).exists():
                self._write(place, version, digest, reader)
            held = os.open(place / FILE, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_SH)
            self._let_go()
            self._held = held
            self._sweep(older_than=place.name)
        return place

    def close(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self._directory / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, place: Path, version: int, digest: str, reader: WeightsReader) -> None:
        """It gets its name when it is whole. What is torn stays a draft, which the next writer replaces."""
        draft = self._directory / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        with reader.view(version) as (found, pieces):
            if found != digest:
                raise UnknownVersionError(f"version {version} was staged anew: {found}, not {digest}")
            write_safetensors(draft / FILE, with_head(pieces) if self._with_head else pieces)
        draft.rename(place)

    def _sweep(self, older_than: str) -> None:
        for place in sorted(self._directory.glob("v*-*")):
            if place.name >= older_than:
                return
            with suppress(BlockingIOError, FileNotFoundError), open(place / FILE, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (place / FILE).unlink()
            with suppress(OSError):  # it is in use, here or on another host
                place.rmdir()


def with_head(pieces: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    """With the embedding as the head too, where no head is published. Raises: WeightsError: there is none."""
    if any(piece.name == HEAD for piece in pieces):
        return list(pieces)
    found = [piece for piece in pieces if piece.name.endswith(EMBEDDING)]
    if len(found) != 1:
        raise WeightsError(
            f"the server has a head of its own (`tie_word_embeddings` false), the weights have none, and "
            f"{len(found)} of them are called *{EMBEDDING}"
        )
    return [*pieces, msgspec.structs.replace(found[0], name=HEAD)]


def write_safetensors(path: Path, pieces: Sequence[NamedBuffer]) -> None:
    """The format's own page: github.com/huggingface/safetensors. Nothing is copied on the way to the file."""
    header, offset = {}, 0
    for piece in pieces:
        end = offset + memoryview(piece.data).nbytes
        header[piece.name] = {
            "dtype": _DTYPES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for piece in pieces:
            file.write(piece.data)
