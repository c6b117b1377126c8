"""A directory or bucket as a transport: anchors, and chains of deltas. Any place that fsspec knows.

    v00000040.json          the entry: written last, so a version without an entry does not exist
    v00000040.safetensors   an anchor: the complete version, which other programs can read too
    v00000041.delta         the delta of each chunk of the version against the entry's base
    owner                   the run that writes here

One relay writes, any number of readers read, and nobody locks. The writer writes the entry last. Readers
verify every digest. So a reader finds a torn, damaged or missing file, and takes another path. A relay of
another run writes nothing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any, BinaryIO

import msgspec

from millrace.core.digest import TensorSpec
from millrace.core.errors import ConfigError, CorruptDeltaError, WeightsError, boundary
from millrace.core.progress import count
from millrace.weights.delta_coding import WIDTHS, apply, encode, kind_of
from millrace.weights.layout import Bytes
from millrace.weights.store.restore_paths import StoredVersion, anchor_is_due, unneeded

CHUNK_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 16, 1 << 18
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
OWNER, OWNER_MAX = "owner", 200
HEADER_BYTES_MAX = 100 << 20  # what safetensors allows


class SlotWeights(msgspec.Struct, frozen=True):
    """A version in a slot. `digest`: as published. `data`: the bytes of its tensors. `check` raises
    TornVersionError if the bytes were overwritten."""

    version: int
    digest: str
    encoded: bytes
    manifest: list[TensorSpec]
    data: Any
    check: Callable[[], None]


class Directory:
    """The versions in a directory or bucket.

    Args:
        url: of fsspec: `file:///shared/run`, `s3://bucket/run`, `gs://...`, `memory://...`.
        owner: the run that writes; empty: this process only reads, or no other run writes.
    """

    def __init__(self, url: str, owner: str = "") -> None:
        import fsspec

        with boundary("weights", f"`weights.directory` ({url})", ConfigError):
            self._files, self._root = fsspec.core.url_to_fs(url)
        self.url, self._owner = url, owner
        self._local = "file" in self._files.protocol

    def refuse_other(self) -> None:
        """Raises: ConfigError: another run writes here. WeightsError: the directory cannot be read."""
        self._files.invalidate_cache()
        with boundary("weights", f"list {self.url}", WeightsError):
            marked = OWNER in self._names()
        owner = self.read(OWNER).decode(errors="replace") if marked else ""
        if owner not in ("", self._owner):  # empty: a run was killed while it wrote the file
            owner = owner[:OWNER_MAX]
            raise ConfigError(
                f"`weights.directory` ({self.url}) belongs to the run `{owner}`, and this is "
                f"`{self._owner}`: each would drop the versions of the other.\n  Name another directory. If "
                f"nobody needs the versions of `{owner}` any more, delete the directory, or `{OWNER}` in it"
            )

    def entries(self) -> dict[int, StoredVersion]:
        """The entry of every version, ascending. Raises WeightsError: the directory cannot be read."""
        self._files.invalidate_cache()
        with boundary("weights", f"list {self.url}", WeightsError):
            names = self._names()
        entries = {}
        for name in sorted(names):
            if name.startswith("v") and name.endswith(".json"):
                with suppress(msgspec.MsgspecError, WeightsError, UnicodeDecodeError):
                    entry = msgspec.json.decode(self.read(name), type=StoredVersion)
                    if name == file_name(entry.version, "json"):
                        entries[entry.version] = entry
        return entries

    def write(
        self, weights: SlotWeights, bases: Iterable[SlotWeights], *, anchor_every: int, keep: int
    ) -> dict[str, int]:
        """Write a version: a delta against the newest of `bases` in the directory, and an anchor if one is
        due. Later versions are dropped first: the batches that made them were undone. The newest `keep`
        versions stay.

        Returns: bytes of the anchor and of the delta, and chunks of each kind of delta. Empty: already here.
        Raises: WeightsError: it cannot be written. TornVersionError: the slot was overwritten.
        ConfigError: another run writes here.
        """
        entries, version = self.entries(), weights.version
        if (stored := entries.get(version)) is not None and stored.digest == weights.digest:
            return {}
        with boundary("weights", f"write version {version} to {self.url}", WeightsError):
            self._files.makedirs(self._root, exist_ok=True)
            self._claim()
            self._sweep()
            self._drop(v for v in entries if v >= version)
            entries = {v: entry for v, entry in entries.items() if v < version}
            base, written = _newest_base(weights, bases, entries), dict[str, int]()
            entry = StoredVersion(version, weights.digest, len(weights.data), weights.encoded, False)
            if base is not None:
                deltas = list(chunk_deltas(weights, base))
                base.check()
                self._put(file_name(version, "delta"), deltas)
                written = dict(Counter(map(kind_of, deltas))) | {"delta_bytes": sum(map(len, deltas))}
                entry = msgspec.structs.replace(
                    entry, base=base.version, base_digest=base.digest, deltas=[len(delta) for delta in deltas]
                )
            if base is None or anchor_is_due(entries, base.version, anchor_every):
                self._put(file_name(version, "safetensors"), anchor_chunks(weights))
                entry = msgspec.structs.replace(entry, anchor=True)
                written["anchor_bytes"] = len(weights.data)
            weights.check()
            self._put(file_name(version, "json"), [msgspec.json.encode(entry)])
            self._drop(unneeded(entries | {version: entry}, keep))
        return written

    def read(self, name: str) -> bytes:
        """All bytes of a file. Raises WeightsError."""
        with boundary("weights", f"read {self.url}/{name}", WeightsError):
            if not self._local:
                data: bytes = self._files.cat_file(f"{self._root}/{name}")
                return data
            with open_plain(f"{self._root}/{name}") as file:
                return file.read()

    def read_anchor(self, version: int, into: Bytes) -> None:
        """Read the tensors of an anchor, one after the other. Raises WeightsError: gone, or too short."""
        name = file_name(version, "safetensors")
        with boundary("weights", f"read {self.url}/{name}", WeightsError):
            path = f"{self._root}/{name}"
            with open_plain(path) if self._local else self._files.open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                if header > HEADER_BYTES_MAX:
                    raise WeightsError(f"{self.url}/{name} is no safetensors file")
                file.seek(8 + header)
                for at in range(0, len(into), CHUNK_BYTES):
                    chunk = file.read(min(CHUNK_BYTES, len(into) - at))
                    into[at : at + len(chunk)] = memoryview(chunk)
                    count(len(chunk))
                    if len(chunk) < min(CHUNK_BYTES, len(into) - at):
                        raise WeightsError(
                            f"{self.url}/{name} ends after {at + len(chunk)} of {len(into)} bytes"
                        )

    def _names(self) -> list[str]:
        try:
            paths: list[str] = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _put(self, name: str, chunks: Sequence[Any]) -> None:
        """Write a file. On a local disk, and in most buckets, the file appears complete or not at all.
        Elsewhere readers ignore an incomplete version, because its entry is written last."""
        path = f"{self._root}/{name}"
        if self._local:
            return put(path, chunks)
        with self._files.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def _claim(self) -> None:
        """Write `owner`. If two runs begin at once, exactly one run gets a local directory. The later run
        gets a bucket, and the earlier run gets the error when it writes its next version."""
        path = f"{self._root}/{OWNER}"
        if self._owner and self._local:
            if self._files.exists(path) and not self.read(OWNER):
                self._files.rm_file(path)
            with suppress(FileExistsError), create(path) as file:
                file.write(self._owner.encode())
        elif self._owner and not self._files.exists(path):
            self._files.pipe_file(path, self._owner.encode())
        if self._owner:
            self.refuse_other()

    def _sweep(self) -> None:
        """Delete the incomplete files of a relay that was killed."""
        for name in self._names():
            if name.endswith(PARTIAL):
                with suppress(OSError):
                    self._files.rm_file(f"{self._root}/{name}")

    def _drop(self, versions: Iterable[int]) -> None:
        """Delete versions, entries first, so that no reader sees an incomplete version."""
        for version in versions:
            for suffix in ("json", "delta", "safetensors"):
                with suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._root}/{file_name(version, suffix)}")


def file_name(version: int, suffix: str) -> str:
    return f"v{version:08}.{suffix}"


def chunk_deltas(weights: SlotWeights, base: SlotWeights) -> Iterator[bytes]:
    """The delta of each chunk of CHUNK_BYTES. Its elements have the dtype of the tensor where the chunk
    begins."""
    starts = [spec.offset for spec in weights.manifest]
    for start in range(0, len(weights.data), CHUNK_BYTES):
        spec, cut = weights.manifest[bisect(starts, start) - 1], slice(start, start + CHUNK_BYTES)
        yield encode(weights.data[cut], base.data[cut], WIDTHS.get(spec.dtype, 1))


def expected_delta_bytes(weights: SlotWeights, base: SlotWeights) -> int:
    """What all deltas together will have, about: from samples spread over the weights. 0: the weights are not
    much more than the samples."""
    num_bytes, found, seen = len(weights.data), 0, 0
    if num_bytes < 4 * SAMPLES * SAMPLE_BYTES:
        return 0
    starts = [spec.offset for spec in weights.manifest]
    for start in range(0, num_bytes, num_bytes // SAMPLES):
        spec = weights.manifest[bisect(starts, start) - 1]
        start -= (start - spec.offset) % 8
        cut = slice(start, start + SAMPLE_BYTES)
        found += len(encode(weights.data[cut], base.data[cut], WIDTHS.get(spec.dtype, 1)))
        seen += len(weights.data[cut])
    return num_bytes * found // seen


def apply_all(deltas: Any, sizes: Sequence[int], data: Bytes) -> None:
    """Apply the delta of every chunk to `data`, in place. `sizes`: bytes of each delta. Raises
    CorruptDeltaError, WrongBaseError."""
    if len(deltas) != sum(sizes) or len(sizes) != -(-len(data) // CHUNK_BYTES):
        raise CorruptDeltaError(f"{len(deltas)} bytes for {len(sizes)} chunks are not {sum(sizes)}")
    at = 0
    for start, size in zip(range(0, len(data), CHUNK_BYTES), sizes, strict=True):
        chunk = data[start : start + CHUNK_BYTES]
        apply(deltas[at : at + size], chunk, chunk)
        at += size


def anchor_chunks(weights: SlotWeights) -> list[Any]:
    """A safetensors file: its header, and the bytes of the tensors as they lie in the slot."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "version": str(weights.version), "digest": weights.digest}
    }
    for spec in weights.manifest:
        if spec.dtype not in DTYPES:
            raise WeightsError(f"tensor `{spec.name}` of dtype {spec.dtype} has no name in safetensors")
        ends = [spec.offset, spec.offset + spec.num_bytes]
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": ends}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    starts = range(0, len(weights.data), CHUNK_BYTES)
    return [
        len(encoded).to_bytes(8, "little"),
        encoded,
        *(memoryview(weights.data[start : start + CHUNK_BYTES]) for start in starts),
    ]


def _newest_base(
    weights: SlotWeights, bases: Iterable[SlotWeights], entries: Mapping[int, StoredVersion]
) -> SlotWeights | None:
    """The newest version in the directory with the layout of `weights`."""
    fits = (
        base
        for base in bases
        if (entry := entries.get(base.version)) is not None
        and entry.digest == base.digest
        and same_layout(base, weights)
    )
    return max(fits, key=lambda base: base.version, default=None)


def same_layout(a: SlotWeights, b: SlotWeights) -> bool:
    """Whether both have the same tensors at the same places."""
    return _layout(a) == _layout(b)


def _layout(weights: SlotWeights) -> list[tuple[Any, ...]]:
    return [(spec.name, spec.dtype, spec.shape, spec.offset, spec.num_bytes) for spec in weights.manifest]


PARTIAL = ".part"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_KINDS = {stat.S_IFLNK: "link", stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


def create(path: str) -> BinaryIO:
    """A new file. Raises: OSError: the name exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666), "wb")


def put(path: str, chunks: Iterable[Any]) -> None:
    """Write a file completely or not at all, in place of an earlier file. Raises: OSError. WeightsError: the
    name exists and is no file."""
    partial = f"{path}.{token_hex(8)}{PARTIAL}"
    with create(partial) as file:
        try:
            file.writelines(chunks)
            file.flush()
            _refuse_others(path)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


def open_plain(path: str) -> BinaryIO:
    """Open a file to read. Raises: OSError. WeightsError: not a file."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            _refuse_others(path)
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        _refuse_others(path)
    return file


def _refuse_others(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "device")
        raise WeightsError(f"{path} is a {kind}, and must be a file: see who put it there, and remove it")
