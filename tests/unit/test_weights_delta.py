"""Deltas: every payload comes back bit for bit, and damage and a wrong base are told apart."""

import contextlib

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import CorruptDeltaError, WeightsError, WrongBaseError
from millrace.weights.delta_coding import RAW, SECTION, SPARSE, XOR, Sections, apply, encode, kind_of

SPECIAL = np.array([0, 0x8000, 0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x0001, 0x8001, 0xFFFF], np.uint16)  # bfloat16


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def changed(old: np.ndarray, share: float, seed: int = 1, units: int = 1) -> np.ndarray:
    """Of 2-byte elements, `share` moved by up to `units`."""
    random, new = np.random.default_rng(seed), old.copy()
    elements = new[: len(new) // 2 * 2].view(np.uint16)
    moved = random.random(len(elements)) < share
    elements[moved] += random.integers(1, units + 1, moved.sum(), dtype=np.uint16)
    return new


def back(payload: bytes, old: np.ndarray) -> np.ndarray:
    into = np.full_like(old, 77)
    apply(payload, old, into)
    return into


@given(
    old=st.binary(max_size=300),
    places=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255)), max_size=40),
    width=st.sampled_from([1, 2, 4, 8]),
    link=st.sampled_from([0.0, 1e6, 1e9, 1e12]),
    offset=st.integers(0, 7),
)
def test_any_bytes_come_back_exactly(old, places, width, link, offset):
    before = np.frombuffer(bytes(offset) + old, np.uint8)[offset:]
    after = before.copy()
    for place, value in places:
        if place < len(after):
            after[place] = value
    assert np.array_equal(back(encode(after, before, width, link_bytes_s=link), before), after)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("odd", [0, 1, 7])
def test_every_density_comes_back_exactly(width, share, odd):
    old = noise(80_000 + odd)
    for units in (1, 20, 65535):
        new = changed(old, share, units=units)
        assert np.array_equal(back(encode(new, old, width), old), new)


def test_not_a_number_infinity_and_minus_zero_come_back_exactly():
    random = np.random.default_rng(0)
    old = random.choice(SPECIAL, 40_000).view(np.uint8)
    new = old.view(np.uint16).copy()
    new[random.random(len(new)) < 0.05] = 0x8000
    payload = encode(new, old, 2)
    assert kind_of(payload) == SPARSE
    assert np.array_equal(back(payload, old), new.view(np.uint8))


def test_nothing_at_all_and_equal_bytes_take_next_to_nothing():
    empty = np.empty(0, np.uint8)
    assert len(back(encode(empty, empty, 2), empty)) == 0
    old = noise(1 << 20)
    payload = encode(old.copy(), old, 2)
    assert len(payload) < 200
    assert np.array_equal(back(payload, old), old)


def test_the_kind_follows_density():
    old = noise(1 << 20)
    sparse, dense = changed(old, 0.01), changed(old, 1.0, units=3)
    assert kind_of(encode(sparse, old, 2)) == SPARSE
    assert kind_of(encode(dense, old, 2)) == XOR
    assert kind_of(encode(noise(1 << 20, 9), old, 2)) == RAW
    assert len(encode(sparse, old, 2)) < len(old) / 100
    assert len(encode(dense, old, 2)) < len(old) / 2


def test_a_link_faster_than_encoding_gets_raw_bytes():
    old = noise(1 << 20)
    dense = changed(old, 1.0, units=3)
    assert kind_of(encode(dense, old, 2, link_bytes_s=1e8)) == XOR
    assert kind_of(encode(dense, old, 2, link_bytes_s=1e10)) == RAW


def test_a_small_chunk_on_a_quick_link_is_not_worth_a_delta():
    old = noise(1 << 18)
    new = changed(old, 0.01)
    assert kind_of(encode(new, old, 2, link_bytes_s=1.25e8)) == SPARSE
    assert kind_of(encode(new[: 1 << 15], old[: 1 << 15], 2, link_bytes_s=1.25e8)) == RAW


def test_a_delta_may_be_applied_in_place():
    old = noise(100_003)
    new = changed(old, 0.02)
    place = old.copy()
    apply(encode(new, old, 2), place, place)
    assert np.array_equal(place, new)


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_another_base_is_a_wrong_base(share):
    old = noise(65_536)
    payload = encode(changed(old, share), old, 2)
    for other in (changed(old, 0.001, seed=5), old[:-8]):
        with pytest.raises(WrongBaseError, match="made against others"):
            apply(payload, other, np.empty_like(old))


@given(st.data())
def test_a_damaged_delta_is_corrupt_never_other_bytes(data):
    old = noise(5_000)
    payload = encode(changed(old, data.draw(st.sampled_from([0.02, 0.4, 1.0])), units=40), old, 2)
    at = data.draw(st.integers(0, len(payload) - 1))
    cut = data.draw(st.booleans())
    broken = payload[:at] if cut else payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]
    with pytest.raises(CorruptDeltaError):
        apply(broken, old, np.empty_like(old))


@given(st.data())
def test_a_forged_delta_is_refused_or_stays_in_its_place(data):
    """With a checksum that is right: lengths and positions are compared before anything is done."""
    old = noise(4_000)
    forged = bytearray(encode(changed(old, data.draw(st.sampled_from([0.02, 0.9])), units=40), old, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(16, min(len(forged) - 1, 80)))
        forged[at] = data.draw(st.integers(0, 255))
    forged[:8] = xxhash.xxh3_64_intdigest(bytes(forged[8:])).to_bytes(8, "little")
    memory = np.full(12_000, 7, np.uint8)
    with contextlib.suppress(WeightsError):
        apply(forged, old, memory[4_000:8_000])
    assert (memory[:4_000] == 7).all() and (memory[8_000:] == 7).all()


def test_a_section_that_claims_a_petabyte_is_refused_before_memory_is_allocated():
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(4_000)))
    size_at, size_bytes = 5, 2
    assert int.from_bytes(frame[size_at : size_at + size_bytes], "little") + 256 == 4_000
    frame[4] |= 0xC0  # the size of the content has eight bytes
    frame[size_at : size_at + size_bytes] = (1 << 50).to_bytes(8, "little")
    body = SECTION.pack(4_000, len(frame)) + bytes(frame)
    with pytest.raises(CorruptDeltaError, match="claims"):
        Sections(memoryview(body)).take(4_000)


def test_a_delta_for_another_place_is_refused():
    old = noise(1_000)
    payload = encode(changed(old, 0.1), old, 2)
    with pytest.raises(CorruptDeltaError, match="its place has 500"):
        apply(payload, old, np.empty(500, np.uint8))
    with pytest.raises(WeightsError, match="one length"):
        encode(old, old[:-1], 2)
