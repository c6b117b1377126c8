"""A directory or bucket as a transport: anchors, and chains of deltas. Any place that fsspec knows.

    v00000040.json          the entry: written last, so a version without one is not there
    v00000040.safetensors   an anchor: the whole version, as other programs read it too
    v00000041.delta         of each chunk of the version's bytes, its delta against the entry's base
    owner                   the run that writes here

One relay writes, any number read, and nobody locks. Writers end with the entry. Readers verify every digest,
so what is torn, damaged or gone is found, and another way is taken. A relay of another run writes nothing.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from millrace.core.digest import TensorSpec
from millrace.core.errors import ConfigError, CorruptDeltaError, WeightsError, boundary
from millrace.weights.delta.coding import WIDTHS, apply, encode, kind_of
from millrace.weights.layout import Bytes
from millrace.weights.store.plain_files import PARTIAL, create, open_plain, put
from millrace.weights.store.restore_paths import StoredVersion, anchor_is_due, needless

CHUNK_BYTES = 1 << 20
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
OWNER, OWNER_MAX = "owner", 200
HEADER_BYTES_MAX = 100 << 20  # what safetensors allows


class Whole(msgspec.Struct, frozen=True):
    """A version in a slot. `digest` as it was published; `data` the bytes of its tensors; `check` raises
    TornVersionError once they were overwritten."""

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
        owner: the run that writes; empty: it is only read, or nobody else writes.
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
        first = self.read(OWNER).decode(errors="replace") if marked else ""
        if first not in ("", self._owner):  # a run that was killed while it wrote its mark left it empty
            first = first[:OWNER_MAX]
            raise ConfigError(
                f"`weights.directory` ({self.url}) belongs to the run `{first}`, and this is "
                f"`{self._owner}`: each would drop the versions of the other.\n  Name another directory. If "
                f"nobody needs the versions of `{first}` any more, delete the directory, or `{OWNER}` in it"
            )

    def entries(self) -> dict[int, StoredVersion]:
        """Of every version that is there, ascending. Raises WeightsError: the directory cannot be read."""
        self._files.invalidate_cache()
        with boundary("weights", f"list {self.url}", WeightsError):
            names = self._names()
        found = {}
        for name in sorted(names):
            if name.startswith("v") and name.endswith(".json"):
                with suppress(msgspec.MsgspecError, WeightsError, UnicodeDecodeError):
                    entry = msgspec.json.decode(self.read(name), type=StoredVersion)
                    if name == file_name(entry.version, "json"):
                        found[entry.version] = entry
        return found

    def write(self, whole: Whole, bases: Iterable[Whole], *, anchor_every: int, kept: int) -> dict[str, int]:
        """Write a version: as a delta against the newest of `bases` that is here, and as an anchor when that
        is due. Versions above it are dropped first: the steps that made them were undone.

        Returns: bytes written as anchor and as delta, and chunks of each kind of delta. Empty: it was here.
        Raises: WeightsError: it cannot be written. TornVersionError: it was overwritten meanwhile.
        ConfigError: another run writes here.
        """
        entries = self.entries()
        if (here := entries.get(whole.version)) is not None and here.digest == whole.digest:
            return {}
        with boundary("weights", f"write version {whole.version} to {self.url}", WeightsError):
            self._files.makedirs(self._root, exist_ok=True)
            self._claim()
            self._sweep()
            self._drop(v for v in entries if v >= whole.version)
            entries = {v: entry for v, entry in entries.items() if v < whole.version}
            base = _newest_base(whole, bases, entries)
            entry, told = (
                StoredVersion(whole.version, whole.digest, len(whole.data), whole.encoded, False),
                {},
            )
            if base is not None:
                deltas = list(chunk_deltas(whole, base))
                base.check()
                self._put(file_name(whole.version, "delta"), deltas)
                told = dict(Counter(map(kind_of, deltas))) | {"delta_bytes": sum(map(len, deltas))}
                entry = msgspec.structs.replace(
                    entry, base=base.version, base_digest=base.digest, deltas=[len(delta) for delta in deltas]
                )
            if base is None or anchor_is_due(entries, base.version, anchor_every):
                self._put(file_name(whole.version, "safetensors"), anchor_parts(whole))
                entry = msgspec.structs.replace(entry, anchor=True)
                told["anchor_bytes"] = len(whole.data)
            whole.check()
            self._put(file_name(whole.version, "json"), [msgspec.json.encode(entry)])
            self._drop(needless(entries | {whole.version: entry}, kept))
        return told

    def read(self, name: str) -> bytes:
        """A whole file. Raises WeightsError."""
        with boundary("weights", f"read {self.url}/{name}", WeightsError):
            if not self._local:
                data: bytes = self._files.cat_file(f"{self._root}/{name}")
                return data
            with open_plain(f"{self._root}/{name}") as file:
                return file.read()

    def read_anchor(self, version: int, into: Bytes) -> None:
        """The tensors of an anchor, one after the other. Raises WeightsError: gone, or of another size."""
        name = file_name(version, "safetensors")
        with boundary("weights", f"read {self.url}/{name}", WeightsError):
            path = f"{self._root}/{name}"
            with open_plain(path) if self._local else self._files.open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                if header > HEADER_BYTES_MAX:
                    raise WeightsError(f"{self.url}/{name} is no safetensors file")
                file.seek(8 + header)
                for at in range(0, len(into), CHUNK_BYTES):
                    part = file.read(min(CHUNK_BYTES, len(into) - at))
                    into[at : at + len(part)] = memoryview(part)
                    if len(part) < min(CHUNK_BYTES, len(into) - at):
                        raise WeightsError(
                            f"{self.url}/{name} ends after {at + len(part)} of {len(into)} bytes"
                        )

    def _names(self) -> list[str]:
        try:
            paths: list[str] = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _put(self, name: str, parts: Sequence[Any]) -> None:
        """A file is there whole or not at all where it can be renamed, and where objects come with their end.
        Elsewhere the entry, which comes last, makes it so."""
        path = f"{self._root}/{name}"
        if self._local:
            return put(path, parts)
        with self._files.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def _claim(self) -> None:
        """Of two runs that begin at once, one has a local directory. The later one has a bucket, and the
        earlier one is told at its next version."""
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
        """What a relay that was killed left half written."""
        for name in self._names():
            if name.endswith(PARTIAL):
                with suppress(OSError):
                    self._files.rm_file(f"{self._root}/{name}")

    def _drop(self, versions: Iterable[int]) -> None:
        """Entries first: a reader sees a version whole or not."""
        for version in versions:
            for suffix in ("json", "delta", "safetensors"):
                with suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._root}/{file_name(version, suffix)}")


def file_name(version: int, suffix: str) -> str:
    return f"v{version:08}.{suffix}"


def chunk_deltas(whole: Whole, base: Whole) -> Iterator[bytes]:
    """Of each CHUNK_BYTES. A chunk is taken as elements of the tensor in which it begins."""
    starts = [spec.offset for spec in whole.manifest]
    for start in range(0, len(whole.data), CHUNK_BYTES):
        spec, cut = whole.manifest[bisect(starts, start) - 1], slice(start, start + CHUNK_BYTES)
        yield encode(whole.data[cut], base.data[cut], WIDTHS.get(spec.dtype, 1))


def apply_all(deltas: Any, sizes: Sequence[int], data: Bytes) -> None:
    """The delta of every chunk of `data`, in place: `sizes` are their bytes. Raises CorruptDeltaError,
    WrongBaseError."""
    if len(deltas) != sum(sizes) or len(sizes) != -(-len(data) // CHUNK_BYTES):
        raise CorruptDeltaError(f"{len(deltas)} bytes for {len(sizes)} chunks are not {sum(sizes)}")
    at = 0
    for start, size in zip(range(0, len(data), CHUNK_BYTES), sizes, strict=True):
        chunk = data[start : start + CHUNK_BYTES]
        apply(deltas[at : at + size], chunk, chunk)
        at += size


def anchor_parts(whole: Whole) -> list[Any]:
    """A safetensors file: its header, and the bytes of the tensors as they lie in the slot."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "version": str(whole.version), "digest": whole.digest}
    }
    for spec in whole.manifest:
        if spec.dtype not in DTYPES:
            raise WeightsError(f"tensor `{spec.name}` of dtype {spec.dtype} has no name in safetensors")
        ends = [spec.offset, spec.offset + spec.num_bytes]
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": ends}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    cuts = range(0, len(whole.data), CHUNK_BYTES)
    return [
        len(encoded).to_bytes(8, "little"),
        encoded,
        *(memoryview(whole.data[start : start + CHUNK_BYTES]) for start in cuts),
    ]


def _newest_base(whole: Whole, bases: Iterable[Whole], entries: Mapping[int, StoredVersion]) -> Whole | None:
    """The newest that readers can have, and that lies in a slot as `whole` does."""
    fits = (
        base
        for base in bases
        if (entry := entries.get(base.version)) is not None
        and entry.digest == base.digest
        and as_laid_out(base, whole)
    )
    return max(fits, key=lambda base: base.version, default=None)


def as_laid_out(one: Whole, other: Whole) -> bool:
    """Whether both have the same tensors at the same places."""
    return _layout(one) == _layout(other)


def _layout(whole: Whole) -> list[tuple[Any, ...]]:
    return [(spec.name, spec.dtype, spec.shape, spec.offset, spec.num_bytes) for spec in whole.manifest]
