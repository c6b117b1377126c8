"""Who connects to a relay, and to whom a relay connects, that is none of this run."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
from test_weights_chain import DEADLINE_S, DEADLINES, SECRET, hosts, model

from millrace.core.errors import WeightsError
from millrace.weights import network
from millrace.weights.wire import ACCEPTED, MAGIC, REFUSED, Chunk, Found, Link, Seal, Unknown, Waiting

BRIEF = msgspec.structs.replace(DEADLINES, connect_s=0.5)


def test_strangers_are_refused_one_by_one_and_the_relay_serves_on():
    with hosts("a", deadlines=BRIEF) as (a,), hosts("b") as (b,):
        digest = a.publish(1, model(1))
        host, port = a.address.split(":")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(range(256)) * 400):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(DEADLINE_S)
                greeting = stranger.recv(40, socket.MSG_WAITALL)
                with suppress(OSError):
                    stranger.sendall(said)
                answer = b""
                with suppress(OSError):
                    while more := stranger.recv(1000):
                        answer += more
            assert greeting.startswith(MAGIC) and answer in (b"", REFUSED)
        assert b.fetch(1, digest, a.address).held == [1]


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40), "there is no relay of this version of Millrace"),
        (MAGIC + bytes(32) + ACCEPTED + bytes(32), "does not know the secret of this run"),
        (MAGIC + bytes(32), "does not answer within 0.5 s"),
        (b"", "does not answer within 0.5 s"),
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
        assert len(heard) <= 64 and SECRET.encode() not in heard


@pytest.mark.parametrize("says", [Found(b"junk"), Seal(1), Chunk(0, "raw", 1), Unknown("gone"), Waiting()])
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
        assert b.fetch(1, digest, a.address).held == [1]
