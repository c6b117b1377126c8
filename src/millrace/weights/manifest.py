"""Manifests: which tensors a slot holds and where, and whether a reader expects exactly those."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from millrace.core.digest import NamedBuffer, TensorSpec, tensor_digest, version_digest
from millrace.core.errors import TornVersionError, WeightsError
from millrace.weights.layout import Bytes, Memory


def bytes_of(tensor: NamedBuffer) -> Bytes:
    """The tensor's memory as flat uint8, without a copy. Raises WeightsError if it is not that."""
    data = np.asarray(tensor.data)
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise WeightsError(
            f"tensor `{tensor.name}`: its buffer is {data.dtype} (contiguous: {data.flags.c_contiguous}), "
            "but weights move as contiguous uint8: use `tensor.contiguous().view(torch.uint8)`"
        )
    return data.reshape(-1)


def make_manifest(tensors: Sequence[NamedBuffer]) -> list[TensorSpec]:
    """Lay the tensors out one after the other."""
    manifest, offset = [], 0
    for tensor in tensors:
        num_bytes = len(bytes_of(tensor))
        manifest.append(TensorSpec(tensor.name, tensor.dtype, tuple(tensor.shape), offset, num_bytes))
        offset += num_bytes
    return manifest


def read_manifest(memory: Memory, slot: int, sequence: int) -> list[TensorSpec]:
    """The manifest of one filling of a slot. Raises TornVersionError, WeightsError (not decodable)."""
    length = int(memory.records["manifest_bytes"][slot])
    encoded = bytes(memory.manifests[slot][:length])
    check_sequence(memory, slot, sequence)
    try:
        manifest = msgspec.msgpack.decode(encoded, type=list[TensorSpec])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"the manifest in slot {slot} ({length} bytes) is damaged: {error}") from error
    for spec in manifest:
        if not 0 <= spec.offset <= spec.offset + spec.num_bytes <= memory.slot_bytes:
            raise WeightsError(
                f"the manifest in slot {slot} is damaged: `{spec.name}` lies at {spec.offset} with "
                f"{spec.num_bytes} bytes, the slot has {memory.slot_bytes}"
            )
    return manifest


def check_sequence(memory: Memory, slot: int, sequence: int) -> None:
    """Raise TornVersionError if the slot was overwritten since `sequence` was read."""
    now = memory.sequence(slot)
    if now != sequence:
        raise TornVersionError(
            f"slot {slot} was overwritten while it was being read (sequence {sequence}, now {now}): "
            "pull the newest version; if this happens often, raise `weights.slots`"
        )


def digest_slot(memory: Memory, slot: int, manifest: Sequence[TensorSpec]) -> str:
    """The version digest of the bytes in the slot."""
    data = memory.data[slot]
    return version_digest(
        (t.name, t.dtype, t.shape, tensor_digest(data[t.offset : t.offset + t.num_bytes])) for t in manifest
    )


def compare(version: int, held: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    """Raise WeightsError, naming every tensor that differs, unless `into` has a place for exactly `held`."""
    published = {tensor.name: tensor for tensor in held}
    expected = {tensor.name: tensor for tensor in into}
    faults = [f"`{name}` was not published" for name in expected if name not in published]
    faults += [f"`{name}` has no place here" for name in published if name not in expected]
    for name in published.keys() & expected.keys():
        theirs, ours = published[name], expected[name]
        there = (theirs.dtype, tuple(theirs.shape), len(theirs.data))
        here = (ours.dtype, tuple(ours.shape), len(bytes_of(ours)))
        if there != here:
            faults.append(f"`{name}` is published as {_describe(*there)}, expected as {_describe(*here)}")
    if not faults and [tensor.name for tensor in held] != [tensor.name for tensor in into]:
        first = next(i for i, tensor in enumerate(held) if tensor.name != into[i].name)
        faults.append(
            f"the order differs: tensor {first} is `{held[first].name}`, expected `{into[first].name}`"
        )
    if faults:
        raise WeightsError(
            f"weights version {version} are not of the model that is served: {'; '.join(sorted(faults))}. "
            "Trainer and engine must be built from the same model configuration and dtype."
        )


def _describe(dtype: str, shape: tuple[int, ...], num_bytes: int) -> str:
    return f"{dtype}{list(shape)} ({num_bytes} bytes)"
