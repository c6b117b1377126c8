"""Writers and readers that spoil one tensor on its way, to be named by dotted path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from millrace.core.digest import Filling, NamedBlock, NamedBuffer, TensorSpec, version_digest
from millrace.core.types import Endpoint
from millrace.weights import ring

Spoil = Callable[[Sequence[NamedBuffer]], list[NamedBuffer]]
VICTIM, OTHER = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"  # of one shape


def _copied(tensor: NamedBuffer) -> NamedBuffer:
    return msgspec.structs.replace(tensor, data=np.array(tensor.data))


def dropped(tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    return [tensor for tensor in tensors if tensor.name != VICTIM]


def duplicated(tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    by_name = {tensor.name: tensor for tensor in tensors}
    return [msgspec.structs.replace(by_name[OTHER], name=VICTIM) if t.name == VICTIM else t for t in tensors]


def renamed(tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    return [msgspec.structs.replace(t, name="model.layers.9.odd") if t.name == VICTIM else t for t in tensors]


def swapped(tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    names = {VICTIM: OTHER, OTHER: VICTIM}
    by_name = {tensor.name: tensor for tensor in tensors}
    return [msgspec.structs.replace(by_name[names.get(t.name, t.name)], name=t.name) for t in tensors]


def flipped(tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    copies = [_copied(tensor) for tensor in tensors]
    next(tensor for tensor in copies if tensor.name == VICTIM).data[7] ^= 0x10
    return copies


class _Frozen:
    """Sends the first version of the victim for ever."""

    def __init__(self) -> None:
        self._first: NamedBuffer | None = None

    def __call__(self, tensors: Sequence[NamedBuffer]) -> list[NamedBuffer]:
        if self._first is None:
            self._first = _copied(next(tensor for tensor in tensors if tensor.name == VICTIM))
        return [self._first if tensor.name == VICTIM else tensor for tensor in tensors]


@dataclass
class _Saboteur:
    """Writes spoiled blocks, and tells the digest of what it was given, as an honest one."""

    honest: ring.RingWriter
    spoil: Spoil

    def begin(self, version: int, manifest: Sequence[TensorSpec]) -> Filling:
        return Filling(version, 0, 0)

    def fill(self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]) -> None:
        spoiled = self.spoil(blocks) if filling.version else _first(self.spoil, blocks)
        self.honest.write(filling.version, spoiled)

    def end(
        self,
        filling: Filling,
        manifest: Sequence[TensorSpec],
        written: Iterable[NamedBlock],
        elsewhere: Iterable[NamedBlock] = (),
    ) -> str:
        pieces = dict(written)
        return version_digest((s.name, s.dtype, s.shape, pieces[s.name].digest) for s in manifest)


def _writer(fault):
    def open_writer(endpoint: Endpoint) -> _Saboteur:
        return _Saboteur(ring.open_writer(endpoint), fault() if isinstance(fault, type) else fault)

    return open_writer


def _first(spoil, tensors):
    """Version 0 goes through as it is; one that freezes remembers it."""
    if isinstance(spoil, _Frozen):
        spoil(tensors)
    return tensors


def _reader(spoil):
    def open_reader(endpoint: Endpoint) -> ring.RingReader:
        reader = ring.open_reader(endpoint)
        honest = reader.read

        def read(version: int, into: Sequence[NamedBuffer]) -> str:
            before = {tensor.name: np.array(tensor.data) for tensor in into}
            digest = honest(version, into)
            if version:
                spoil({tensor.name: tensor.data for tensor in into}, before)
            return digest

        reader.read = read
        return reader

    return open_reader


def _put(target: str, source):
    def spoil(into, before):
        into[target][:] = source(into, before)

    return spoil


def _swap(into, before):
    into[VICTIM][:], into[OTHER][:] = np.array(into[OTHER]), np.array(into[VICTIM])


def _flip(into, before):
    into[VICTIM][7] ^= 0x10


write_dropped, write_duplicated, write_renamed = _writer(dropped), _writer(duplicated), _writer(renamed)
write_swapped, write_flipped, write_frozen = _writer(swapped), _writer(flipped), _writer(_Frozen)

read_dropped = read_frozen = _reader(_put(VICTIM, lambda into, before: before[VICTIM]))
read_duplicated = _reader(_put(VICTIM, lambda into, before: into[OTHER]))
read_swapped, read_flipped = _reader(_swap), _reader(_flip)
