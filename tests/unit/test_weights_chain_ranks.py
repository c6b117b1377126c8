"""A trainer whose ranks are on several hosts: each host's relay has their pieces, and gets the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import test_weights_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from test_weights_chain import DEADLINE_S, Host, hosts, until, wire

from millrace.core.digest import BlockDigest, NamedBlock, NamedBuffer, digest_buffers, tensor_digest
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WeightsError
from millrace.core.types import Staged
from millrace.weights.chain import holding
from millrace.weights.manifest import make_manifest

Block = tuple[NamedBuffer, int]  # of a tensor, and the head whose rank has it


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "CHUNK_STEP_BYTES", 1000)
        patch.setattr(test_weights_chain, "SLOT_BYTES", 1 << 18)
        yield


def tensor(name: str, shape: Sequence[int], seed: int) -> NamedBuffer:
    data = np.random.default_rng(seed).integers(0, 256, 2 * math.prod(shape), np.uint8)
    return NamedBuffer(name, "bfloat16", tuple(shape), data)


def cut(whole: NamedBuffer, dim: int, first: int, last: int) -> NamedBuffer:
    grid = whole.data.reshape(*whole.shape, 2)
    block = np.ascontiguousarray(grid[(slice(None),) * dim + (slice(first, last),)])
    start = tuple(first if each == dim else 0 for each in range(len(whole.shape)))
    return NamedBuffer(whole.name, whole.dtype, block.shape[:-1], block.reshape(-1), start)


def model(seed: int) -> list[NamedBuffer]:
    shapes = {"rows": (60, 70), "columns": (60, 70), "experts": (4, 30, 20), "norm": (9,), "none": (0, 3)}
    return [tensor(name, shape, seed + index) for index, (name, shape) in enumerate(shapes.items())]


def halves(tensors: Sequence[NamedBuffer]) -> Iterator[Block]:
    """By rows, by columns, by the middle; what is small is the first head's."""
    for whole in tensors:
        dim = {"rows": 0, "columns": 1, "experts": 1}.get(whole.name)
        if dim is None:
            yield whole, 0
        else:
            middle = whole.shape[dim] // 2
            yield cut(whole, dim, 0, middle), 0
            yield cut(whole, dim, middle, whole.shape[dim]), 1


def pieces(blocks: Sequence[Block], head: int) -> list[NamedBlock]:
    return [
        (b.name, BlockDigest(b.start or (0,) * len(b.shape), tuple(b.shape), tensor_digest(b.data)))
        for b, owner in blocks
        if owner == head
    ]


def publish(heads: Sequence[Host], version: int, tensors: list[NamedBuffer], blocks: Sequence[Block]) -> str:
    """Into the slots of each head what its ranks have. Only digests go from host to host."""
    manifest, digests = make_manifest(tensors), set()
    for index, head in enumerate(heads):
        filling = head.writer.begin(version, manifest)
        head.writer.fill(filling, manifest, [block for block, owner in blocks if owner == index])
        elsewhere = [
            piece for other in range(len(heads)) if other != index for piece in pieces(blocks, other)
        ]
        digests.add(head.writer.end(filling, manifest, pieces(blocks, index), elsewhere))
    (digest,) = digests
    return digest


def fetch_all(version: int, digest: str, orders: dict[Host, list[str]]) -> list[Staged]:
    with ThreadPoolExecutor(len(orders)) as pool:
        futures = [pool.submit(host.fetch, version, digest, *sources) for host, sources in orders.items()]
        return [future.result(DEADLINE_S) for future in futures]


def the_bytes(tensors: list[NamedBuffer]) -> list[bytes]:
    return [bytes(tensor.data) for tensor in tensors]


def test_two_heads_with_half_of_the_pieces_each_complete_each_other_and_feed_one_chain():
    with hosts("a", "b", "c", "d") as (a, b, c, d), wire(a.address) as of_a, wire(b.address) as of_b:
        tensors = model(1)
        digest = publish([a, b], 1, tensors, list(halves(tensors)))
        with wire(d.address) as of_d:
            # The last of the chain has time to send: so no head sends more than one version.
            orders = {a: [of_d.address], b: [of_a.address], c: [of_b.address], d: [c.address]}
            got = fetch_all(1, digest, orders)
            sent = {"a": of_a.passed, "b": of_b.passed, "d": of_d.passed}
        for host, staged in zip(orders, got, strict=True):
            assert (staged.versions, staged.digest) == ([1], digest_buffers(tensors))
            assert host.read(1) == the_bytes(tensors)
        num_bytes = sum(len(tensor.data) for tensor in tensors)
        assert got[0].decoded_bytes + got[1].decoded_bytes == num_bytes
        assert sent["a"] < 0.8 * num_bytes and sent["b"] < 1.3 * num_bytes and sent["d"] < 0.8 * num_bytes


def test_a_head_cannot_stage_what_others_wrote_and_is_readable_only_when_it_has_all():
    with hosts("a", "b") as (a, b):
        digest = publish([a, b], 1, model(1), list(halves(model(1))))
        with pytest.raises(UnknownVersionError, match="3 blocks were written on other hosts"):
            asyncio.run(a.relay.stage(1, digest))
        with pytest.raises(WeightsError, match="no source was named"):
            a.fetch(1, digest)
        assert a.reader.versions() == b.reader.versions() == []
        assert fetch_all(1, digest, {a: [b.address], b: [a.address]})[0].versions == [1]


def test_a_head_that_has_everything_needs_no_source():
    with hosts("a") as (a,):
        tensors = model(1)
        digest = publish([a], 1, tensors, [(tensor, 0) for tensor in tensors])
        assert a.fetch(1, digest).versions == [1] and a.read(1) == the_bytes(tensors)


def test_a_change_in_what_a_rank_wrote_is_found_and_nobody_gets_it():
    with hosts("a", "b") as (a, b):
        digest = publish([a, b], 1, model(1), list(halves(model(1))))
        a.writer._memory.data[0][3] ^= 1
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(a.fetch, 1, digest, b.address), pool.submit(b.fetch, 1, digest, a.address)]
            errors = [future.exception(DEADLINE_S) for future in futures]
        assert all(isinstance(error, WeightsError) for error in errors)
        assert any(isinstance(error, DigestMismatchError) for error in errors)
        assert a.reader.versions() == b.reader.versions() == []


def test_the_ranks_take_another_slot_than_the_one_that_is_being_completed():
    with hosts("a", "b") as (a, b), wire(b.address, limit=3000, holds=True) as slow:
        with ThreadPoolExecutor(1) as pool:
            digest = publish([a, b], 1, model(1), list(halves(model(1))))
            fetched = pool.submit(a.fetch, 1, digest, slow.address)
            until(lambda: any(a.writer._memory.pinned(slot) for slot in range(3)))
            for version in range(2, 6):
                publish([a, b], version, model(version), list(halves(model(version))))
            slow.free.set()
            error = fetched.exception(DEADLINE_S)
        assert isinstance(error, UnknownVersionError)  # b was not asked to keep it
        part = a.partial(1, digest)
        assert part is not None and part.intact
        assert not any(a.writer._memory.pinned(slot) for slot in range(3))


def test_ranks_that_have_no_other_slot_take_the_one_that_is_being_completed_and_nothing_is_spoiled():
    with hosts("a", "b", slots=2) as (a, b), wire(b.address, limit=3000, holds=True) as slow:
        with ThreadPoolExecutor(1) as pool:
            digest = publish([a, b], 1, model(1), list(halves(model(1))))
            fetched = pool.submit(a.fetch, 1, digest, slow.address)
            until(lambda: any(a.writer._memory.pinned(slot) for slot in range(2)))
            for version in (2, 3):
                newest = publish([a, b], version, model(version), list(halves(model(version))))
            slow.free.set()
            assert isinstance(fetched.exception(DEADLINE_S), WeightsError)
        assert fetch_all(3, newest, {a: [b.address], b: [a.address]})[0].versions == [3]
        assert a.read(3) == b.read(3) == the_bytes(model(3))


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[NamedBuffer], list[Block]]:
    """Any tensors, each cut at any places of one dimension, and each part with any head."""
    tensors, blocks = [], []
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 40), max_size=3))
        whole = tensor(f"t{index}", shape, draw(st.integers(0, 1 << 30)))
        tensors.append(whole)
        if 0 in shape or not shape:
            blocks.append((whole, draw(st.integers(0, 1))))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        ends = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=4))})
        for first, last in pairwise(ends):
            blocks.append((cut(whole, dim, first, last), draw(st.integers(0, 1))))
    return tensors, draw(st.permutations(blocks))


@pytest.mark.parametrize("chunk_bytes", [64, 1000])
def test_any_tensors_in_any_pieces_arrive_bit_for_bit(chunk_bytes, monkeypatch):
    monkeypatch.setattr(holding, "CHUNK_STEP_BYTES", chunk_bytes)
    with hosts("a", "b", "c") as made:
        a, b, c = made
        version = 0

        @settings(max_examples=25, deadline=None)
        @given(divided())
        def check(case: tuple[list[NamedBuffer], list[Block]]) -> None:
            nonlocal version
            version += 1
            tensors, blocks = case
            digest = publish([a, b], version, tensors, blocks)
            got = fetch_all(version, digest, {a: [b.address], b: [a.address], c: [b.address, a.address]})
            assert {staged.digest for staged in got} == {digest_buffers(tensors)}
            assert all(host.read(version) == the_bytes(tensors) for host in made)

        check()
