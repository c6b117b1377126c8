"""Chunks that are pulled, over a double of NIXL: what is proved, who is left, what late bytes can touch."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_weights_chain import (
    DEADLINE_S,
    HASTY,
    MODEL_BYTES,
    STALL_S,
    _small_chunks,  # noqa: F401
    hosts,
    model,
    until,
    wire,
)

from millrace.core import extras
from millrace.core.digest import BlockDigest, NamedBlock, digest_buffers, tensor_digest
from millrace.core.errors import ConfigError, DigestMismatchError, UnknownVersionError, WeightsError
from millrace.weights.chain.nixl import link
from millrace.weights.chain.nixl.double import AgentDouble
from millrace.weights.chain.nixl.trial import pull_some
from millrace.weights.layout import Bytes
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker

PULLED = {"transport": "nixl"}
CHUNKS = 18  # of the model


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> dict[str, AgentDouble]:
    """By the names of their relays."""
    made = dict[str, AgentDouble]()
    monkeypatch.setattr(link, "make_agent", lambda name: made.setdefault(name, AgentDouble(name)))
    return made


def the_bytes(seed: int) -> list[bytes]:
    return [bytes(tensor.data) for tensor in model(seed)]


def test_raw_chunks_are_pulled_down_a_chain_and_none_goes_over_the_link():
    with hosts("a", "b", "c", **PULLED) as (a, b, c), wire(a.address) as cable:
        digest = a.publish(7, model(1))
        got = [b.fetch(7, digest, cable.address), c.fetch(7, digest, b.address)]
        for host, staged in zip((b, c), got, strict=True):
            assert host.read(7) == the_bytes(1) and staged.digest == digest
            assert staged.encodings == {"nixl": CHUNKS} and staged.received_bytes == MODEL_BYTES
        assert cable.passed < 4000


def test_a_relay_forwards_what_it_has_pulled_before_it_has_all(agents):
    with hosts("a", "b", "c", **PULLED) as (a, b, c), ThreadPoolExecutor(2) as pool:
        digest = a.publish(1, model(1))
        with wire(a.address, limit=1500, holds=True) as slow:
            fetched = [pool.submit(b.fetch, 1, digest, slow.address)]
            fetched.append(pool.submit(c.fetch, 1, digest, b.address))
            until(lambda: len(agents["c"].pulls) > 2)
            assert b.reader.versions() == c.reader.versions() == []
            slow.free.set()
            assert [future.result(DEADLINE_S).versions for future in fetched] == [[1], [1]]
        assert c.read(1) == the_bytes(1)


def test_rows_that_lie_apart_are_pulled_to_where_they_belong():
    """Two ranks wrote half of the columns each, as parts of one tensor."""
    tensor = model(1)[0]
    rows, columns = tensor.shape
    whole = tensor.data.reshape(rows, 4 * columns)
    pieces = list[NamedBlock]()
    for start in (0, columns // 2):
        block = np.ascontiguousarray(whole[:, 4 * start :][:, : 2 * columns])
        pieces.append(("embed", BlockDigest((0, start), (rows, columns // 2), tensor_digest(block))))
    with hosts("a", "b", **PULLED) as (a, b):
        manifest = make_manifest([tensor])
        filling = a.writer.begin(1, manifest)
        a.writer.fill(filling, manifest, [tensor])
        digest = a.writer.end(filling, manifest, pieces)
        asyncio.run(a.relay.stage(1, digest))
        got = b.fetch(1, digest, a.address)
        assert got.digest == digest_buffers([tensor]) and got.encodings.keys() == {"nixl"}
        assert b.read(1) == [bytes(tensor.data)]


def test_who_has_an_earlier_version_gets_deltas_over_the_link_and_pulls_the_rest():
    with hosts("a", "b", **PULLED) as (a, b):
        b.fetch(1, a.publish(1, model(1)), a.address)
        later = model(1)
        later[0].data[:] = model(2)[0].data
        later[2].data[7] ^= 1
        got = b.fetch(2, a.publish(2, later), a.address)
        assert b.read(2) == [bytes(tensor.data) for tensor in later]
        assert 0 < got.encodings["nixl"] < sum(got.encodings.values()) == CHUNKS


def test_a_relay_that_pulls_refuses_one_without_nixl_in_words():
    with hosts("a") as (a,), hosts("b", **PULLED) as (b,):
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError, match=rf"{a.address} has no NIXL.*`weights.transport` must be the"):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == []


def test_what_changes_on_its_way_is_refused_and_named(agents):
    def change(number: int, filled: Bytes) -> None:
        filled[3] ^= number == 2

    with hosts("a", "b", **PULLED) as (a, b):
        digest = a.publish(1, model(1))
        agents["b"].landed = change
        with pytest.raises(
            DigestMismatchError, match=r"chunk 2 of `embed` of version 1 was changed on its way"
        ):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == [] and not b.partial(1, digest).here[2]
        assert b.fetch(1, digest, a.address).versions == [1]
        assert b.read(1) == the_bytes(1)


def test_a_slot_that_is_overwritten_while_it_is_pulled_is_torn_and_no_damage(agents):
    with hosts("a", "b", **PULLED) as (a, b):
        digest = a.publish(1, model(1))

        def go_back(number: int, filled: Bytes) -> None:
            if number == 2:
                a.writer.write(0, model(9))  # the trainer has gone back: version 1 is no more
                filled[:] = 0

        agents["b"].landed = go_back
        with pytest.raises(UnknownVersionError, match=r"overwritten"):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == [] and not b.partial(1, digest).here[2]


def test_a_change_in_the_memory_of_a_source_is_found_by_the_digest_of_the_piece():
    with hosts("a", "b", **PULLED) as (a, b):
        digest = a.publish(1, model(1))
        a.writer._memory.data[0][100] ^= 1
        with pytest.raises(DigestMismatchError, match=r"`embed` of version 1 has digest .* the trainer's"):
            b.fetch(1, digest, a.address)
        assert b.reader.versions() == []


def test_a_source_that_nixl_calls_dead_is_left_for_the_next_one(agents):
    with hosts("a", "b", "c", **PULLED) as (a, b, c):
        digest = a.publish(1, model(1))
        b.fetch(1, digest, a.address)
        agents["c"].gone.add("a")
        with pytest.raises(WeightsError, match=rf"{a.address}: pull from it through NIXL.*REMOTE_DISCONNECT"):
            c.fetch(1, digest, a.address)
        assert c.fetch(1, digest, a.address, b.address).source == b.address


def test_pulls_that_do_not_end_are_given_up_and_their_late_bytes_touch_nothing(agents):
    with hosts("a", "b", "c", deadlines=HASTY, **PULLED) as (a, b, c):
        digest = a.publish(1, model(1))
        b.fetch(1, digest, a.address)
        stuck = agents["c"]
        stuck.frozen = True
        late = f"has not ended within {STALL_S:g} s"
        with pytest.raises(WeightsError, match=f"{a.address}: pull from it .* {late}"):
            c.fetch(1, digest, a.address)
        assert len(stuck.pulls) == link.AHEAD
        stuck.frozen, late = False, list(stuck.pulls)
        assert c.fetch(1, digest, b.address).versions == [1]
        used = {pull.here[0][0] for pull in stuck.pulls[len(late) :]}
        assert used.isdisjoint(pull.here[0][0] for pull in late)
        for data in a.writer._memory.data:
            data[:] = 7
        for pull in late:
            pull.land()
        assert c.read(1) == the_bytes(1)


def test_a_buffer_is_used_again_once_its_pull_has_ended(agents):
    with hosts("a", "b", deadlines=HASTY, **PULLED) as (a, b):
        digest = a.publish(1, model(1))
        agents["b"].frozen = True
        with pytest.raises(WeightsError, match="has not ended"):
            b.fetch(1, digest, a.address)
        late = list(agents["b"].pulls)
        for pull in late:
            pull.ends = True
        agents["b"].frozen = False
        b.fetch(1, digest, a.address)
        assert {pull.here[0][0] for pull in agents["b"].pulls} == {pull.here[0][0] for pull in late}
        assert not agents["b"].known


def test_a_relay_whose_pulls_never_end_says_that_it_must_be_restarted(agents):
    with hosts("a", "b", deadlines=HASTY, **PULLED) as (a, b):
        digest = a.publish(1, model(1))
        agents["b"].frozen = True
        for _ in range(link.ABANDONED_MAX // link.AHEAD):
            with pytest.raises(WeightsError, match="has not ended"):
                b.fetch(1, digest, a.address)
        with pytest.raises(WeightsError, match="16 pulls through NIXL never ended here: restart this relay"):
            b.fetch(1, digest, a.address)


def test_a_relay_without_nixl_says_what_to_install(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    relay = RelayWorker("relay", 2, address="127.0.0.1", secret="secret", **PULLED)
    with pytest.raises(ConfigError, match=r"(?s)needs the package nixl, .*millrace\[nixl\]"):
        asyncio.run(relay.open(1000))


def test_bytes_are_pulled_before_a_run_and_others_than_were_sent_are_refused(agents):
    asyncio.run(pull_some())
    assert [len(agents[name].pulls) for name in ("source", "receiver")] == [0, 1]
    agents["receiver"] = AgentDouble("receiver", landed=lambda number, filled: filled.__setitem__(7, 0))
    with pytest.raises(WeightsError, match="other bytes came than were sent"):
        asyncio.run(pull_some())


def test_a_relay_of_a_single_host_needs_no_nixl(agents):
    asyncio.run(RelayWorker("relay", 2, **PULLED).open(1000))
    assert not agents
