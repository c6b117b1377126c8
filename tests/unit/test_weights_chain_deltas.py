"""Deltas between relays: who has an earlier version gets what changed, bit for bit."""

import asyncio

import numpy as np
import pytest
import test_weights_chain
from test_weights_chain import hosts, until, wire

from millrace.core.digest import NamedBuffer
from millrace.core.errors import WeightsError
from millrace.weights.delta_coding import encode

SIZES = {"embed": 200_000, "norm": 33, "head": 100_001}


@pytest.fixture(autouse=True)
def _large_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_weights_chain, "SLOT_BYTES", 700_000)


def model(version: int, share: float = 0.01, sizes: dict[str, int] = SIZES) -> list[NamedBuffer]:
    """Of each version `share` of the elements differs from the one before."""
    random = np.random.default_rng(0)
    made = {name: random.integers(0, 60_000, size, np.uint16) for name, size in sizes.items()}
    for step in range(version):
        random = np.random.default_rng(step)
        for data in made.values():
            data += random.random(data.size) < share
    return [NamedBuffer(name, "bfloat16", data.shape, data.view(np.uint8)) for name, data in made.items()]


def the_bytes(tensors: list[NamedBuffer]) -> list[bytes]:
    return [bytes(tensor.data) for tensor in tensors]


def test_a_relay_that_has_an_earlier_version_gets_deltas_down_the_chain():
    with hosts("a", "b", "c") as (a, b, c):
        for version in (1, 2, 5):
            digest = a.publish(version, model(version))
            got = [b.fetch(version, digest, a.address), c.fetch(version, digest, b.address)]
            for host, staged in zip((b, c), got, strict=True):
                assert host.read(version) == the_bytes(model(version))
                raw = staged.encodings.get("raw", 0)
                assert staged.decoded_bytes == 2 * sum(SIZES.values())
                if version == 1:
                    assert staged.received_bytes == staged.decoded_bytes and raw == sum(
                        staged.encodings.values()
                    )
                else:
                    assert staged.received_bytes * 15 < staged.decoded_bytes and not raw


def test_dense_changes_come_as_another_kind_of_delta():
    with hosts("a", "b") as (a, b):
        first = a.publish(1, model(1, share=1.0))
        b.fetch(1, first, a.address)
        second = a.publish(2, model(2, share=1.0))
        got = b.fetch(2, second, a.address)
        assert got.encodings.get("xor", 0) > 0 and got.received_bytes * 2 < got.decoded_bytes
        assert b.read(2) == the_bytes(model(2, share=1.0))


@pytest.mark.parametrize("case", ["another digest", "gone at the source", "another layout", "a fast link"])
def test_raw_chunks_where_no_delta_helps(case):
    with hosts("a", "b", slots=2) as (a, b):
        b.fetch(1, a.publish(1, model(1)), a.address)
        newest = model(3)
        if case == "another digest":
            a.publish(1, model(7))
        elif case == "gone at the source":
            a.publish(2, model(2))
        elif case == "another layout":
            newest = model(3, sizes={"embed": 100_000, "head": 100_000})
        else:
            assert a.relay._network is not None
            a.relay._network._rates["127.0.0.1"] = 1e13
        got = b.fetch(3, a.publish(3, newest), a.address)
        assert got.encodings.keys() == {"raw"}
        assert b.read(3) == the_bytes(newest)


def test_a_chain_cut_amid_deltas_goes_on_where_it_stopped():
    with hosts("a", "b") as (a, b):
        b.fetch(1, a.publish(1, model(1)), a.address)
        digest = a.publish(2, model(2))
        with wire(a.address, limit=2500) as cable:
            got = b.fetch(2, digest, cable.address, a.address)
        assert b.read(2) == the_bytes(model(2))
        assert got.decoded_bytes == 2 * sum(SIZES.values()) and "raw" not in got.encodings


def test_a_damaged_delta_is_refused_and_named():
    with hosts("a", "b") as (a, b):
        b.fetch(1, a.publish(1, model(1)), a.address)
        digest = a.publish(2, model(2))
        with wire(a.address, flip=2500) as cable:
            with pytest.raises(WeightsError, match="was changed on its way"):
                b.fetch(2, digest, cable.address)
        b.fetch(2, digest, a.address)
        assert b.read(2) == the_bytes(model(2))


def test_a_base_that_is_overwritten_while_deltas_are_made_is_given_up(monkeypatch):
    """The writer takes the base's slot: what was encoded against it is not sent."""
    with hosts("a", "b", slots=3) as (a, b):
        b.fetch(1, a.publish(1, model(1)), a.address)
        digest = a.publish(2, model(2))
        taken = []

        def slow(new, old, width, **options):
            if not taken:
                taken.append(True)
                a.writer.write(3, model(3))
                a.writer.write(4, model(4))
            return encode(new, old, width, **options)

        monkeypatch.setattr("millrace.weights.chain.sending.encode", slow)
        got = b.fetch(2, digest, a.address)
        assert got.encodings.keys() == {"raw"} and b.read(2) == the_bytes(model(2))


def test_deltas_pass_a_relay_that_still_receives():
    with hosts("a", "b", "c") as (a, b, c):
        first = a.publish(1, model(1))
        b.fetch(1, first, a.address)
        c.fetch(1, first, a.address)
        digest = a.publish(2, model(2))
        with wire(a.address, limit=3600, holds=True) as cable:

            async def both() -> list[object]:
                one = asyncio.create_task(b.relay.fetch(2, digest, [cable.address]))
                two = asyncio.create_task(c.relay.fetch(2, digest, [b.address]))
                await asyncio.to_thread(until, lambda: (part := c.partial(2, digest)) and part.here.any())
                cable.free.set()
                return [await one, await two]

            asyncio.run(both())
        assert c.read(2) == the_bytes(model(2))
