"""What the gateway refuses, its bounds and deadlines, and its end: nothing is left."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.gateways import (
    LARGE,
    PATH,
    WAIT_S,
    Asked,
    Gateway,
    answer_of,
    ask,
    own,
    playing,
    reply,
    taken,
    until,
)

from millrace.core.errors import DeadlineExceeded
from millrace.episodes.gateway import exchange, http_answer, server
from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateway]:
    gateway = Gateway(grace_s=0.05, keepalive_s=0.02, body_bytes_max=100_000)
    yield gateway
    gateway.server.close()


@pytest.fixture
def gateway(shared: Gateway) -> Iterator[Gateway]:
    yield shared
    assert not shared.faults


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def test_too_many_open_calls_are_429(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gateway.sessions.open()
    monkeypatch.setattr(session, "_calls_open_max", 1)
    first = Asked(gateway, session.key)
    pending = taken(session)
    status, answer, headers = ask(gateway, session.key)
    assert status == 429 and headers["retry-after"] == "15"
    assert "wait for their replies" in answer["error"]["message"]
    pending.answer(reply("x"))
    assert first.answer()[0] == 200


def test_a_body_that_is_too_long_is_413_in_words(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    status, answer, _ = ask(gateway, session.key, body=b" " * 100_001)
    assert status == 413 and answer["error"]["message"] == "the body has more than 100000 bytes"
    with closing(gateway.connection()) as connection:
        headers = {"Content-Type": "application/json", "x-api-key": session.key}
        connection.request("POST", PATH, iter([b" " * 60_000] * 2), headers, encode_chunked=True)
        assert answer_of(connection)[0] == 413


def test_a_body_that_is_much_too_long_is_not_read(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "DRAINED_BYTES_MAX", 1000)
    session = gateway.sessions.open()
    with closing(gateway.connection()) as connection:
        connection.putrequest("POST", PATH)
        for name, value in [("x-api-key", session.key), ("Content-Length", "200000")]:
            connection.putheader(name, value)
        connection.putheader("Content-Type", "application/json")
        connection.endheaders()
        status, _, headers = answer_of(connection)
    assert status == 413 and headers["connection"] == "close"


def test_a_head_request_has_headers_only(gateway: Gateway) -> None:
    with closing(gateway.connection()) as connection:
        connection.request("HEAD", "/")
        assert answer_of(connection)[:2] == (401, b"")
        connection.request("HEAD", "/")
        assert answer_of(connection)[0] == 401


def test_a_bug_is_500_without_its_traceback_and_the_traceback_is_kept() -> None:
    with own() as gateway:
        session = gateway.sessions.open()
        with playing(session, "bug"):
            answers = [
                ask(gateway, session.key, body={"say": "bug"}),
                ask(gateway, session.key, body={"say": "hi"}),
                ask(gateway, session.key, body={"say": "hi", "stream": True}),
                ask(gateway, session.key, "/v1/say/count", b"1234"),
            ]
        for status, answer, headers in answers:
            assert status == 500 and headers["x-should-retry"] == "false"
            assert "ZeroDivisionError" not in str(answer) and "the gateway failed" in str(answer)
        assert gateway.server.faults == len(gateway.faults) == 4
        assert "a bug in read" in gateway.faults[0] and "Traceback" in gateway.faults[0]


def test_damaged_requests_are_refused_and_are_no_bugs(gateway: Gateway) -> None:
    draw = random.Random(7)
    session = gateway.sessions.open()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\nx-api-key: {session.key}\r\n"
    whole = (
        head + "Content-Type: application/json\r\nContent-Length: 13\r\n\r\n"
    ).encode() + b'{"say": "hi"}'
    statuses = []
    with playing(session):
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(damaged))
                damaged[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
            with socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S) as connection:
                connection.sendall(damaged)
                connection.shutdown(socket.SHUT_WR)
                content = b"".join(iter(lambda c=connection: received(c), b""))
            statuses += [int(content.split()[1])] if content else []
        assert ask(gateway, session.key)[0] == 200
    assert statuses and all(status < 500 for status in statuses), statuses


def test_a_wait_for_a_reply_has_an_end_and_the_call_goes_on() -> None:
    with own(call_s=0.05) as gateway:
        session = gateway.sessions.open()
        status, answer, headers = ask(gateway, session.key)
        assert (status, answer["error"]["message"]) == (504, "no reply within 0.05 s")
        assert headers["retry-after"] == "1", "the retry joins the call"
        pending = taken(session)
        until(lambda: not pending.awaited)
        pending.answer(reply("late"))
        assert ask(gateway, session.key, x_stainless_retry_count="1")[1]["said"] == "late"


def test_an_idle_connection_is_closed() -> None:
    with own(idle_s=0.1) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S) as connection:
            assert received(connection) == b""


def test_a_body_that_does_not_come_ends_its_connection() -> None:
    with own(body_s=0.1) as gateway:
        key = gateway.sessions.open().key
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 9\r\n\r\n"
        with socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S) as connection:
            connection.sendall(head.encode())
            assert received(connection) == b""


def test_connections_and_headers_are_bounded() -> None:
    with own(connections_max=1, header_bytes_max=4096) as gateway:
        session = gateway.sessions.open()
        with playing(session), closing(gateway.connection()) as connection:
            headers = {"Content-Type": "application/json", "x-api-key": session.key}
            connection.request("POST", PATH, b'{"say": "hi"}', headers)
            assert answer_of(connection)[0] == 200
            with socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S) as other:
                refused = received(other)
                assert refused.startswith(b"HTTP/1.1 503") and b"Retry-After: 5\r\n" in refused
            connection.request("POST", PATH, b'{"say": "hi"}', headers | {"x-large": "x" * 5000})
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                answer_of(connection)


def test_a_large_body_and_a_large_reply_arrive_whole() -> None:
    with own() as gateway:
        session = gateway.sessions.open()
        say = "x" * LARGE
        with playing(session, "y" * LARGE):
            status, answer, _ = ask(gateway, session.key, body={"say": say})
        assert status == 200 and len(answer["said"]) == LARGE and answer["to"] == say


def test_close_answers_the_calls_that_wait_and_leaves_no_thread_or_socket() -> None:
    threads = set(threading.enumerate())
    gateway = Gateway()
    session = gateway.sessions.open()
    waiting = [Asked(gateway, session.key, body={"say": str(num)}) for num in range(3)]
    pending = [taken(session) for _ in waiting]
    idle = socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S)
    gateway.server.close()
    for asked in waiting:
        status, answer, _ = asked.answer()
        assert (status, answer["error"]["message"]) == (503, "the gateway is closing")
    assert received(idle) == b""
    idle.close()
    assert not pending[0].awaited
    assert pending[0].answer(reply("too late"))
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S)
    gateway.server.close()


def test_a_request_on_a_connection_that_is_left_while_the_server_closes_is_refused_in_words() -> None:
    with own() as gateway, closing(gateway.connection()) as connection:
        session = gateway.sessions.open()
        assert gateway.server._around is not None
        gateway.server._around.end = RefusedCall("the gateway is closing", 503)
        headers = {"Content-Type": "application/json", "x-api-key": session.key}
        connection.request("POST", PATH, b'{"say": "hi"}', headers)
        status, answer, told = answer_of(connection)
    assert (status, answer["error"]["message"]) == (503, "the gateway is closing")
    assert told["x-should-retry"] == "false" and session.counts.calls == 0


def test_an_auxiliary_function_that_is_late_is_not_asked_again() -> None:
    release = threading.Event()
    with own(call_s=0.05) as gateway:
        gateway.server._work.put(lambda: release.wait(WAIT_S) and None)
        status, _, headers = ask(gateway, gateway.sessions.open().key, "/v1/say/count", b"12345")
        release.set()
    assert (status, headers["x-should-retry"]) == (504, "false")


def large_answer_begun(gateway: Gateway) -> socket.socket:
    """A connection whose answer is larger than what the system takes at once. Nothing of it is read."""
    key = gateway.sessions.open().key
    session = gateway.sessions.find(key)
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\nx-api-key: {key}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\nContent-Length: 13\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", gateway.server.port), WAIT_S)
    connection.sendall(head.encode() + b'{"say": "hi"}')
    pending = taken(session)
    pending.answer(reply("y" * LARGE))
    until(lambda: pending.delivered)
    return connection


def test_a_client_that_does_not_read_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "SEND_S", 0.1)
    with own() as gateway, closing(large_answer_begun(gateway)) as connection:
        assert gateway.server._around is not None
        until(lambda: not gateway.server._around.writes)
        assert read_all(connection) < LARGE


def test_close_lets_an_answer_under_way_end() -> None:
    gateway = Gateway()
    with closing(large_answer_begun(gateway)) as connection:
        closer = threading.Thread(target=gateway.server.close)
        closer.start()
        assert read_all(connection) > LARGE
        closer.join(WAIT_S)
    assert not closer.is_alive()


def read_all(connection: socket.socket) -> int:
    return sum(map(len, iter(lambda: received(connection), b"")))


def test_close_has_a_deadline_when_a_function_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 0.05)
    release = threading.Event()
    gateway = Gateway()
    asked = threading.Event()

    def hang() -> None:
        asked.set()
        release.wait(WAIT_S)

    gateway.server._work.put(hang)
    assert asked.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="gateway-auxiliary"):
        gateway.server.close()
    release.set()
    gateway.server.close()


def test_a_start_that_fails_raises_and_leaves_no_thread(gateway: Gateway) -> None:
    threads = set(threading.enumerate())
    second = GatewayServer(OpenSessions(), {})
    with pytest.raises(OSError):
        second.start(port=gateway.server.port)
    second.close()
    assert set(threading.enumerate()) <= threads
