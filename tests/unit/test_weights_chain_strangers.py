"""Who connects to a relay, and to whom a relay connects, that is none of this run."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import msgspec
import pytest
from test_weights_chain import DEADLINE_S, DEADLINES, SECRET, hosts, model, until
from tests.cables import stranger, wire

from millrace.core.errors import WeightsError
from millrace.weights.chain import network
from millrace.weights.chain.wire import (
    ACCEPTED,
    ACCEPTING,
    CONNECTING,
    MAGIC,
    REFUSED,
    Chunk,
    ChunkChecksum,
    Link,
    Unknown,
    VersionOffer,
    Waiting,
    _proof,
)

BRIEF_S = 2.0  # also a loaded machine shakes hands within it
BRIEF = msgspec.structs.replace(DEADLINES, connect_s=BRIEF_S)


def answers(address, said):
    """The greeting of the relay there, and all that it answers, to who says this."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(DEADLINE_S)
        greeting = stranger.recv(40, socket.MSG_WAITALL)
        with suppress(OSError):
            stranger.sendall(said)
        answer = b""
        with suppress(OSError):
            while more := stranger.recv(1000):
                answer += more
    return greeting, answer


def test_strangers_are_refused_one_by_one_and_the_relay_serves_on():
    said = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(range(256)) * 400)
    with hosts("a", deadlines=BRIEF) as (a,), hosts("b") as (b,), ThreadPoolExecutor(len(said)) as strangers:
        digest = a.publish(1, model(1))
        for greeting, answer in strangers.map(answers, [a.address] * len(said), said):
            assert greeting.startswith(MAGIC) and answer in (b"", REFUSED)
        assert b.fetch(1, digest, a.address).versions == [1]


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40), "there is no relay of this version of Millrace"),
        (MAGIC + bytes(32) + ACCEPTED + bytes(32), "does not know the secret of this run"),
        (MAGIC + bytes(32), f"does not answer within {BRIEF_S:g} s"),
        (b"", f"does not answer within {BRIEF_S:g} s"),
    ],
)
def test_who_is_no_relay_of_this_run_gets_no_further_than_its_greeting(says, message):
    with hosts("b", deadlines=BRIEF) as (b,):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(b.fetch, 1, "digest", f"127.0.0.1:{listener.getsockname()[1]}")
            connection, _ = listener.accept()
            with connection:
                connection.sendall(says)
                error = fetched.exception(DEADLINE_S)
                connection.settimeout(DEADLINE_S)
                heard = connection.recv(1000)
        assert isinstance(error, WeightsError) and message in str(error)
        assert len(heard) < 100 and SECRET.encode() not in heard


@pytest.mark.parametrize(
    "says", [VersionOffer(b"junk"), ChunkChecksum(1), Chunk(0, "raw", 1), Unknown("gone"), Waiting()]
)
def test_a_relay_that_does_not_keep_the_protocol_is_named_and_left(says):
    async def answer(link: Link, *_: object) -> None:
        await link.receive()
        await link.send(says)

    with hosts("a", "b") as (a, b):
        digest = a.publish(1, model(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "answer", answer)
            with pytest.raises(WeightsError, match=f"the relay at {a.address}"):
                b.fetch(1, digest, a.address)
        assert b.fetch(1, digest, a.address).versions == [1]


def test_a_stranger_between_two_relays_can_pass_on_neither_proof():
    with hosts("a", "b") as (a, b), stranger(a.address) as between:
        digest = a.publish(1, model(1))
        with pytest.raises(WeightsError, match=rf"{between.address} refuses this one.*or a stranger"):
            b.fetch(1, digest, between.address)
        assert between.passed < 100 and b.reader.versions() == []
        assert b.fetch(1, digest, between.address, a.address).source == a.address


def test_a_stranger_cannot_pass_on_a_proof_in_the_name_of_another_relay():
    proofs = {
        _proof(SECRET, side, challenges, *addresses)
        for side in (CONNECTING, ACCEPTING)
        for challenges in (bytes(64), bytes(63) + b"1")
        for addresses in ((b"a:1", b"b:2"), (b"b:2", b"a:1"), (b"a:1b", b":2"), (b"a:1", b""))
    }
    assert len(proofs) == 16


def test_strangers_that_say_nothing_keep_no_relay_waiting(caplog):
    """None of them is given up for its silence in the time of this test: only the oldest have to go."""
    patient = msgspec.structs.replace(DEADLINES, connect_s=DEADLINE_S)
    with hosts("a", deadlines=patient) as (a,), hosts("b", "c") as (b, c), ExitStack() as strangers:
        with wire(a.address, limit=9000, holds=True) as slow, ThreadPoolExecutor(1) as pool:
            digest, host, port = a.publish(1, model(1)), *a.address.split(":")
            under_way = pool.submit(c.fetch, 1, digest, slow.address)
            until(lambda: c.partial(1, digest))
            with caplog.at_level(logging.WARNING):
                silent = [
                    strangers.enter_context(socket.create_connection((host, int(port)))) for _ in range(300)
                ]
                assert b.fetch(1, digest, a.address).versions == [1]
            slow.free.set()
            assert under_way.result(DEADLINE_S).source == slow.address
        silent[-1].settimeout(DEADLINE_S)
        assert silent[-1].recv(40, socket.MSG_WAITALL).startswith(MAGIC)
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)  # it is still waited for
        assert 1 <= len(caplog.records) < 12
