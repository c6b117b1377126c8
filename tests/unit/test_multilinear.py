"""The digest that a GPU computes: numpy, torch and JAX compute the same, and it sees what changed."""

from __future__ import annotations

from itertools import combinations

import multilinear_jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.digest import (
    MULTILINEAR,
    XXH3,
    BlockDigest,
    NamedBuffer,
    TensorSpec,
    block_digest,
    digest_buffers,
    kind_of,
    published_digest,
    tensor_digest,
    version_digest,
)
from millrace.core.multilinear import BLOCK_BYTES, KEYS, WORDS, Multilinear, block_sums, finished
from millrace.devices import gpu
from millrace.devices.gpu import tensor_digests

SIZES = [0, 1, 3, 7, 8, 9, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5, 700_001]


def some_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).integers(0, 256, count, dtype=np.uint8)


def digest(data: np.ndarray) -> str:
    return tensor_digest(data, MULTILINEAR)


def plain(data: bytes) -> str:
    """As the definition reads, in integers of Python."""
    padded = data + bytes(-len(data) % BLOCK_BYTES)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    keys, sums = KEYS.tolist(), b""
    for start in range(0, len(words), WORDS):
        block = words[start : start + WORDS]
        low = sum(k * w for k, w in zip(keys[0], block, strict=True)) % 2**64
        high = sum(k * (w >> 32) for k, w in zip(keys[1], block, strict=True)) % 2**64
        sums += low.to_bytes(8, "little") + high.to_bytes(8, "little")
    return MULTILINEAR + finished(sums, len(data))


@pytest.mark.parametrize("count", SIZES)
def test_numpy_and_torch_give_what_the_definition_says(count):
    data = some_bytes(count)
    assert digest(data) == plain(data.tobytes()) == tensor_digests([torch.from_numpy(data)])[0]


@pytest.mark.parametrize("count", SIZES)
def test_jax_gives_the_same(count):
    data = some_bytes(count)
    assert digest(data) == multilinear_jax.digest(pytest.importorskip("jax"), data)


def test_numpys_integers_may_be_signed_or_not():
    words = some_bytes(3 * BLOCK_BYTES).view(np.int64).reshape(-1, WORDS)
    low, high = block_sums(words, KEYS.view(np.int64))
    sums = np.ascontiguousarray(np.stack([low, high], axis=1))
    assert digest(words.reshape(-1).view(np.uint8)) == MULTILINEAR + finished(sums, words.nbytes)


@given(st.integers(0, 3 * BLOCK_BYTES), st.lists(st.integers(0, 2 * BLOCK_BYTES), max_size=6))
@settings(max_examples=60, deadline=None)
def test_bytes_may_come_in_parts_of_any_size(count, cuts):
    data, state, start = some_bytes(count), Multilinear(), 0
    for stop in [*sorted(min(cut, count) for cut in cuts), count]:
        state.update(data[start:stop])
        start = stop
    assert MULTILINEAR + state.hexdigest() == digest(data)


def test_a_device_may_take_blocks_in_bands_of_any_size(monkeypatch):
    tensor = torch.from_numpy(some_bytes(5 * BLOCK_BYTES + 9))
    whole = tensor_digests([tensor])
    for band in (1, 2, 3):
        monkeypatch.setattr(gpu, "BAND", band)
        assert tensor_digests([tensor]) == whole


@pytest.mark.parametrize("offset", range(9))
def test_views_may_begin_anywhere(offset):
    data = some_bytes(2 * BLOCK_BYTES + 100)[offset:]
    assert digest(data) == digest(data.copy()) == tensor_digests([torch.from_numpy(data)])[0]


@pytest.mark.parametrize("shape", [(1, 1), (40, 24), (3, 8192), (700, 13)])
def test_blocks_of_any_strides_are_digested_as_their_bytes(shape):
    whole = some_bytes(4 * shape[0] * shape[1]).reshape(2 * shape[0], 2 * shape[1])
    for block in (whole[: shape[0], : shape[1]], whole[::2, shape[1] :], whole[:0]):
        wanted = digest(np.ascontiguousarray(block).reshape(-1))
        assert block_digest(block, MULTILINEAR) == tensor_digests([torch.from_numpy(block)])[0] == wanted


def test_tensors_of_every_format_are_digested_as_their_bytes():
    values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, -1.5] * 3001)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        tensor = values.nan_to_num().to(dtype) if dtype == torch.int8 else values.to(dtype)
        assert tensor_digests([tensor])[0] == digest(tensor.view(torch.uint8).numpy())
    assert tensor_digests([torch.tensor(1.0), torch.empty(0, 3)]) == [
        digest(np.float32([1.0]).view(np.uint8)),
        digest(np.empty(0, np.uint8)),
    ]


def test_a_signed_zero_and_the_payload_of_a_nan_are_seen():
    bits = np.array([0x0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    assert len({digest(one.reshape(1).view(np.uint8)) for one in bits}) == len(bits)


def test_every_flip_of_one_bit_is_seen():
    data = some_bytes(BLOCK_BYTES + 24)
    found = {digest(data)}
    for byte in (*range(64), *range(4000, 4016), *range(BLOCK_BYTES - 8, len(data))):
        for bit in range(8):
            data[byte] ^= 1 << bit
            found.add(digest(data))
            data[byte] ^= 1 << bit
    assert len(found) == 1 + 8 * (64 + 16 + 32)


def test_zeros_at_the_end_count():
    assert len({digest(np.zeros(count, np.uint8)) for count in SIZES}) == len(SIZES)


def test_keys_are_odd_and_differ_enough_for_every_exchange_to_be_seen():
    """What the docstring's argument needs: no two keys of a sum agree in their last 33 bits."""
    assert (KEYS % np.uint64(2) == 1).all()
    for keys in KEYS:
        assert len(np.unique(keys % np.uint64(2**33))) == WORDS


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("bit", [0, 15, 31, 32, 63])
def test_exchanged_elements_are_seen(size, bit):
    """Also where they differ in one high bit: a number and its negative."""
    kind = np.dtype(f"<u{size}")
    data = np.zeros(64 // size, kind)
    data[3:] = kind.type(1 << min(bit, 8 * size - 1))
    before = digest(data.view(np.uint8))
    for i, j in combinations(range(len(data)), 2):
        other = data.copy()
        other[[i, j]] = other[[j, i]]
        assert (digest(other.view(np.uint8)) != before) == (data[i] != data[j]), (i, j)


def test_negating_many_numbers_is_seen():
    """All changes are in high bits, where integers that wrap are weakest."""
    for dtype in (np.float32, np.float64):
        values = np.random.default_rng(0).normal(size=4096).astype(dtype)
        found = [digest(values.view(np.uint8)), digest((-values).view(np.uint8))]
        for step in (2, 3, 4):
            other = values.copy()
            other[::step] *= -1
            found.append(digest(other.view(np.uint8)))
        assert len(set(found)) == len(found)


def test_exchanged_blocks_are_seen():
    data = some_bytes(3 * BLOCK_BYTES).reshape(3, -1)
    orders = [[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1], [1, 2, 0], [2, 0, 1]]
    assert len({digest(np.ascontiguousarray(data[order]).reshape(-1)) for order in orders}) == 6


def test_changes_drawn_at_random_are_seen():
    generator, data = np.random.default_rng(1), some_bytes(2 * BLOCK_BYTES)
    found = {digest(data)}
    for _ in range(2000):
        other, count = data.copy(), generator.integers(1, 40)
        other[generator.integers(0, len(data), count)] += generator.integers(1, 255, count, dtype=np.uint8)
        found.add(digest(other))
    assert len(found) == 2001


# ---------------------------------------------------------------- kinds


def test_a_digest_names_its_kind():
    data, buffer = some_bytes(100), NamedBuffer("a", "uint8", (100,), some_bytes(100))
    for kind in (XXH3, MULTILINEAR):
        one = tensor_digest(data, kind)
        version = digest_buffers([buffer], kind)
        assert kind_of(one) == kind_of(version) == kind
        assert version == version_digest([("a", "uint8", (100,), one)], kind)
        for pieces in ([(0, 100)], [(0, 60), (60, 40)]):
            parts = [BlockDigest((a,), (n,), tensor_digest(data[a : a + n], kind)) for a, n in pieces]
            spec = TensorSpec("a", "uint8", (100,), 0, 100, tuple(parts))
            assert kind_of(spec.digest) == kind_of(published_digest([spec])) == kind
            assert (published_digest([spec]) == version) == (len(pieces) == 1)
