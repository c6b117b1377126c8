"""Manifests: the tensors of a slot, their places and blocks, and whether a reader expects these tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
from msgspec.structs import replace

from millrace.core.digest import (
    NamedBuffer,
    TensorSpec,
    block_digest,
    kind_of,
    lay_out,
    published_digest,
    tensor_digest,
    version_digest,
    version_kind,
)
from millrace.core.errors import TornVersionError, WeightsError
from millrace.devices.large_memory import each
from millrace.weights.layout import Bytes, Memory

Shape = tuple[int, ...]


def bytes_of(tensor: NamedBuffer) -> Bytes:
    """The tensor's memory as flat uint8, without a copy. Raises WeightsError: not contiguous uint8."""
    data = np.asarray(tensor.data)
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise WeightsError(
            f"tensor `{tensor.name}`: its buffer is {data.dtype} (contiguous: {data.flags.c_contiguous}), "
            "but weights move as contiguous uint8: use `tensor.contiguous().view(torch.uint8)`"
        )
    return data.reshape(-1)


def make_manifest(tensors: Sequence[NamedBuffer]) -> list[TensorSpec]:
    """Lay the tensors out one after the other."""
    return lay_out((t.name, t.dtype, t.shape, len(bytes_of(t))) for t in tensors)


def placed(data: Bytes, spec: TensorSpec, start: Sequence[int], shape: Sequence[int]) -> Bytes:
    """A view of any strides of the bytes of a tensor's block, in the slot."""
    tensor = data[spec.offset : spec.offset + spec.num_bytes]
    if tuple(shape) == spec.shape:
        return tensor
    width = spec.num_bytes // math.prod(spec.shape)
    rows = tensor.reshape(*spec.shape[:-1], spec.shape[-1] * width)
    *above, last = (slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
    return rows[(*above, slice(last.start * width, last.stop * width))]


def exact(spec: TensorSpec) -> bool:
    """Whether each value of the tensor is in exactly one of its blocks."""
    return _exact(spec.shape, spec.num_bytes, tuple((block.start, block.shape) for block in spec.blocks))


@lru_cache(1 << 14)
def _exact(shape: Shape, num_bytes: int, blocks: tuple[tuple[Shape, Shape], ...]) -> bool:
    if [size for _, size in blocks] == [shape]:
        return not any(blocks[0][0])
    if not math.prod(shape) or not num_bytes or num_bytes % math.prod(shape):
        return not blocks and not math.prod(shape)
    if any(not len(start) == len(size) == len(shape) for start, size in blocks):
        return False
    ends = [tuple(map(sum, zip(*block, strict=True))) for block in blocks]
    corners = [start for start, _ in blocks] + ends
    cuts = [sorted({0, size, *line}) for size, *line in zip(shape, *corners, strict=True)]
    times = np.zeros([len(line) - 1 for line in cuts])
    for (start, _), end in zip(blocks, ends, strict=True):
        lines = zip(cuts, start, end, strict=True)
        times[tuple(slice(line.index(first), line.index(last)) for line, first, last in lines)] += 1
    return all(line[0] == 0 and line[-1] == size for line, size in zip(cuts, shape, strict=True)) and bool(
        (times == 1).all()
    )


def read_manifest(memory: Memory, slot: int, sequence: int) -> list[TensorSpec]:
    """The manifest of one filling of a slot. Raises TornVersionError, WeightsError (not decodable)."""
    length = int(memory.records["manifest_bytes"][slot])
    encoded = bytes(memory.manifests[slot][:length])
    check_sequence(memory, slot, sequence)
    return decode_manifest(encoded, memory.slot_bytes, f"in slot {slot}")


def decode_manifest(encoded: bytes, slot_bytes: int, where: str) -> list[TensorSpec]:
    """The manifest. Raises WeightsError: the manifest at `where` is damaged, or no slot has room for it."""
    try:
        manifest = msgspec.msgpack.decode(encoded, type=list[TensorSpec])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"the manifest {where} ({len(encoded)} bytes) is damaged: {error}") from error
    for spec in manifest:
        if not 0 <= spec.offset <= spec.offset + spec.num_bytes <= slot_bytes:
            raise WeightsError(
                f"the manifest {where} is damaged: `{spec.name}` lies at {spec.offset} with "
                f"{spec.num_bytes} bytes, the slot has {slot_bytes}"
            )
        if not exact(spec):
            raise WeightsError(f"the manifest {where} is damaged: `{spec.name}` is not its blocks")
    return manifest


def in_order(manifest: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The same tensors one after the other, their blocks in order and none absent. Every relay with a version
    gets the same manifest."""
    specs = lay_out((spec.name, spec.dtype, spec.shape, spec.num_bytes) for spec in manifest)
    return [
        replace(
            spec,
            blocks=tuple(replace(b, absent=False) for b in sorted(old.blocks, key=lambda block: block.start)),
        )
        for spec, old in zip(specs, manifest, strict=True)
    ]


def check_sequence(memory: Memory, slot: int, sequence: int) -> None:
    """Raise TornVersionError if the slot was overwritten since `sequence` was read."""
    now = memory.sequence(slot)
    if now != sequence:
        raise TornVersionError(
            f"slot {slot} was overwritten while it was being read (sequence {sequence}, now {now}): "
            "pull the newest version; if this happens often, raise `weights.slots`"
        )


def digest_slot(memory: Memory, slot: int, manifest: Sequence[TensorSpec]) -> tuple[str, str]:
    """Version digests of the bytes in the slot: (of tensors, as readers digest; of blocks, as writers did).
    The kind of hash is the writers'."""
    data, kind = memory.data[slot], version_kind(manifest)

    def digested(spec: TensorSpec) -> tuple[str, TensorSpec]:
        digest = tensor_digest(data[spec.offset : spec.offset + spec.num_bytes], kind)
        digests = [
            digest
            if block.shape == spec.shape and kind_of(block.digest) == kind
            else block_digest(placed(data, spec, block.start, block.shape), kind_of(block.digest))
            for block in spec.blocks
        ]
        blocks = (replace(block, digest=digest) for block, digest in zip(spec.blocks, digests, strict=True))
        return digest, replace(spec, blocks=tuple(blocks))

    digests = each(digested, manifest)
    tensors = ((spec.name, spec.dtype, spec.shape, digest) for digest, spec in digests)
    return version_digest(tensors, kind), published_digest([spec for _, spec in digests])


def compare(version: int, tensors: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    """Raise WeightsError, naming every tensor that differs, unless `into` has a place for exactly
    `tensors`."""
    published = {tensor.name: tensor for tensor in tensors}
    expected = {tensor.name: tensor for tensor in into}
    faults = [f"`{name}` was not published" for name in expected if name not in published]
    faults += [f"`{name}` has no place here" for name in published if name not in expected]
    for name in published.keys() & expected.keys():
        theirs, ours = published[name], expected[name]
        there = (theirs.dtype, tuple(theirs.shape), len(theirs.data))
        here = (ours.dtype, tuple(ours.shape), ours.data.nbytes)
        if there != here:
            faults.append(f"`{name}` is published as {_describe(*there)}, expected as {_describe(*here)}")
    if not faults and [tensor.name for tensor in tensors] != [tensor.name for tensor in into]:
        first = next(i for i, tensor in enumerate(tensors) if tensor.name != into[i].name)
        faults.append(
            f"the order differs: tensor {first} is `{tensors[first].name}`, expected `{into[first].name}`"
        )
    if faults:
        raise WeightsError(
            f"weights version {version} are not of the model that is served: {'; '.join(sorted(faults))}. "
            "Trainer and engine must be built from the same model configuration and dtype."
        )


def _describe(dtype: str, shape: tuple[int, ...], num_bytes: int) -> str:
    return f"{dtype}{list(shape)} ({num_bytes} bytes)"
