"""A version as a file that servers load, in a directory that both hosts see under one path.

The first replica writes the file, and the other replicas find the file there. A replica holds a shared lock
while it needs the file; the lock ends with the process. Files of older versions without a lock are removed.
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
    """One replica's view of `directory`. A replica needs one version at a time.

    `with_head`: the server has a head of its own, although the model's head is tied to its embedding.
    """

    def __init__(self, directory: Path, *, with_head: bool) -> None:
        self._directory, self._with_head = directory.absolute(), with_head
        self._locked: int | None = None  # a file descriptor
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)

    def hold(self, version: int, digest: str, reader: WeightsReader) -> Path:
        """A directory with `version` in it. The directory stays until the next call, or `close`.

        Raises: UnknownVersionError, TornVersionError; StorageError."""
        own = "-own-head" if self._with_head else ""
        place = self._directory / f"v{version:08d}-{digest}{own}"
        with writing(place), self._alone():
            if not (place / FILE).exists():
                self._write(place, version, digest, reader)
            locked = os.open(place / FILE, os.O_RDONLY)
            fcntl.flock(locked, fcntl.LOCK_SH)
            self._let_go()
            self._locked = locked
            self._sweep(older_than=place.name)
        return place

    def close(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
        self._locked = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self._directory / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, place: Path, version: int, digest: str, reader: WeightsReader) -> None:
        """The directory gets its name when it is complete. A torn directory stays a draft, which the next
        writer replaces."""
        draft = self._directory / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        with reader.view(version) as (staged, buffers):
            if staged != digest:
                raise UnknownVersionError(f"version {version} was staged anew: {staged}, not {digest}")
            write_safetensors(draft / FILE, with_head(buffers) if self._with_head else buffers)
        draft.rename(place)

    def _sweep(self, older_than: str) -> None:
        for place in sorted(self._directory.glob("v*-*")):
            if place.name >= older_than:
                return
            with suppress(BlockingIOError, FileNotFoundError), open(place / FILE, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (place / FILE).unlink()
            with suppress(OSError):  # the directory is in use, here or on another host
                place.rmdir()


def with_head(buffers: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    """`buffers` with the embedding as the head too, if they have no head.

    Raises: WeightsError: there is no embedding, or there are several."""
    if any(buffer.name == HEAD for buffer in buffers):
        return list(buffers)
    embeddings = [buffer for buffer in buffers if buffer.name.endswith(EMBEDDING)]
    if len(embeddings) != 1:
        raise WeightsError(
            f"the server has a head of its own (`tie_word_embeddings` false), the weights have none, and "
            f"{len(embeddings)} of them are called *{EMBEDDING}"
        )
    return [*buffers, msgspec.structs.replace(embeddings[0], name=HEAD)]


def write_safetensors(path: Path, buffers: Sequence[NamedBuffer]) -> None:
    """Write a file of the format at github.com/huggingface/safetensors, straight from the buffers."""
    header, offset = {}, 0
    for buffer in buffers:
        end = offset + memoryview(buffer.data).nbytes
        header[buffer.name] = {
            "dtype": _DTYPES[buffer.dtype],
            "shape": buffer.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for buffer in buffers:
            file.write(buffer.data)
