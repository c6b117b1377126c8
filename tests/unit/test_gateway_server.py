"""The gateway over real HTTP: keys, retries, streams, errors in words; and nothing is left at the end."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from millrace.core.errors import DeadlineExceeded
from millrace.environments.gateway import exchange, http_answer, server
from millrace.environments.gateway.calls import Call, RefusedCall, Reply
from millrace.environments.gateway.open_sessions import OpenSessions
from millrace.environments.gateway.server import GatewayServer
from millrace.environments.gateway.sessions import PendingCall, Session, closing_reply
from millrace.environments.gateway.surroundings import GatewayLimits

PATH = "/v1/say"
WAIT_S = 20.0
LARGE = 20 << 20


class SayDialect:
    """`{"say": "text", "stream": false}`. The text "bug" is one in `read`, and a reply "bug" is one too."""

    def read(self, body: bytes) -> Call:
        try:
            asked = json.loads(body)
            say, stream = asked["say"], asked.get("stream", False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RefusedCall("the body has no `say`", field="say") from error
        if not isinstance(say, str) or not isinstance(stream, bool):
            raise RefusedCall("`say` must be a string, and `stream` a boolean")
        if say == "bug":
            raise ZeroDivisionError("a bug in read")
        return Call(prompt=say, stream=stream)

    def reply(self, call: Call, reply: Reply) -> dict[str, Any]:
        if reply.content == "bug":
            raise ZeroDivisionError("a bug in reply")
        return {"said": reply.content, "to": call.prompt}

    def events(self, call: Call, reply: Reply) -> Iterator[bytes]:
        for word in self.reply(call, reply)["said"].split():
            yield f"data: {word}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str, field: str | None) -> dict[str, Any]:
        return {"type": "error", "error": {"message": message, "status": status, "field": field}}


class Gateway:
    def __init__(self, **limits: Any) -> None:
        self.sessions, self.faults = OpenSessions(), list[str]()
        auxiliary = {"/v1/say/count": self.count}
        self.server = GatewayServer(
            self.sessions,
            {PATH: SayDialect()},
            auxiliary=auxiliary,
            model="tiny",
            limits=GatewayLimits(**limits),
            on_fault=self.faults.append,
        )
        self.server.start()

    def count(self, session: Session, body: bytes) -> dict[str, Any]:
        if body == b"[]":
            raise RefusedCall("an empty list")
        return {"bytes": len(body) // (len(body) - 4)}

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT_S)


Answer = tuple[int, Any, dict[str, str]]


def answer_of(connection: http.client.HTTPConnection) -> Answer:
    answer = connection.getresponse()
    content = answer.read()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    is_json = headers.get("content-type") == "application/json"
    return answer.status, json.loads(content) if is_json and content else content, headers


def ask(gateway: Gateway, key: str = "", path: str = PATH, body: Any = None, **headers: str) -> Answer:
    given = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body or {"say": "hi"}).encode()
    with closing(gateway.connection()) as connection:
        connection.request("POST", path, content, given)
        return answer_of(connection)


def reply(text: str) -> Reply:
    return Reply(id="r", created=1, model="tiny", text=text, content=text, ids=[1])


class Asked:
    """A request in a thread of its own."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(ask(*args, **named)))
        self._thread.start()

    def answer(self) -> Answer:
        self._thread.join(WAIT_S)
        return self._answers[0]


@contextmanager
def playing(session: Session, text: str = "yes") -> Iterator[list[PendingCall]]:
    """An environment that answers each call at once."""
    calls: list[PendingCall] = []

    def play() -> None:
        while (pending := session.next_call(WAIT_S)) is not None:
            calls.append(pending)
            pending.answer(reply(text))

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield calls
    finally:
        session.wake()
        thread.join(WAIT_S)


def taken(session: Session) -> PendingCall:
    pending = session.next_call(WAIT_S)
    assert pending is not None
    return pending


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateway]:
    gateway = Gateway(grace_s=0.05, keepalive_s=0.02, body_bytes_max=100_000)
    yield gateway
    gateway.server.close()


@pytest.fixture
def gateway(shared: Gateway) -> Iterator[Gateway]:
    yield shared
    assert not shared.faults


@contextmanager
def own(**limits: Any) -> Iterator[Gateway]:
    gateway = Gateway(**limits)
    try:
        yield gateway
    finally:
        gateway.server.close()


@pytest.mark.parametrize("name", ["Authorization", "x_api_key", "x_goog_api_key", "path", "with another"])
def test_the_key_may_stand_in_each_place(gateway: Gateway, name: str) -> None:
    session = gateway.sessions.open()
    headers = {"x_session_id": "of the agent", name: session.key}
    path = PATH
    if name == "Authorization":
        headers[name] = f"bearer {session.key}"
    elif name == "path":
        headers, path = {}, f"/sessions/{session.key}{PATH}?beta=true"
    elif name == "with another":
        headers = {"Authorization": "Bearer sk-of-the-user", "x_api_key": session.key}
    with playing(session):
        status, answer, _ = ask(gateway, path=path, **headers)
    assert (status, answer) == (200, {"said": "yes", "to": "hi"})


@pytest.mark.parametrize(("key", "words"), [("", "no key"), ("mr-wrong", "of no episode")])
def test_a_request_without_a_known_key_is_401_in_the_form_of_the_dialect(
    gateway: Gateway, key: str, words: str
) -> None:
    status, answer, _ = ask(gateway, key)
    assert status == 401
    assert words in answer["error"]["message"] and answer["type"] == "error"


def test_the_key_of_an_ended_session_is_409_and_sdks_do_not_try_again(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    session.end()
    status, answer, headers = ask(gateway, session.key)
    assert status == 409 and answer["error"]["message"] == "this episode has ended"
    assert headers["x-should-retry"] == "false"


def test_a_connection_is_kept_for_further_calls(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    headers = {"Content-Type": "application/json", "x-api-key": session.key}
    with playing(session) as calls, closing(gateway.connection()) as connection:
        for num in range(3):
            connection.request("POST", PATH, json.dumps({"say": str(num)}), headers)
            assert answer_of(connection)[1] == {"said": "yes", "to": str(num)}
            assert connection.sock is not None
    assert len(calls) == session.counts.calls == 3


def test_a_retry_joins_the_running_call(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    first = Asked(gateway, session.key)
    pending = taken(session)
    retry = Asked(gateway, session.key, x_stainless_retry_count="1")
    until(lambda: session.counts.joined == 1)
    assert session.next_call(0) is None
    pending.answer(reply("once"))
    assert first.answer()[1] == retry.answer()[1] == {"said": "once", "to": "hi"}


def test_a_retry_after_the_answer_gets_the_same_reply(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    with playing(session) as calls:
        first = ask(gateway, session.key)
        retry = ask(gateway, session.key, x_stainless_retry_count="2")
    assert first[:2] == retry[:2]
    assert len(calls) == session.counts.replayed == 1


@pytest.mark.parametrize("count", ["0", "", "x", "-1", "²"])
def test_an_equal_body_without_a_retry_is_a_new_call(gateway: Gateway, count: str) -> None:
    session = gateway.sessions.open()
    with playing(session) as calls:
        for _ in range(2):
            assert ask(gateway, session.key, x_stainless_retry_count=count)[0] == 200
    assert len(calls) == 2


def test_an_idempotency_key_makes_calls_one(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    with playing(session) as calls:
        for key, say in [("a", "x"), ("a", "x"), ("b", "x"), ("a", "y")]:
            ask(gateway, session.key, body={"say": say}, Idempotency_Key=key)
    assert [one.call.prompt for one in calls] == ["x", "x", "y"]


def test_a_call_outlives_its_connection_and_the_retry_gets_the_reply(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    body = json.dumps({"say": "hi"}).encode()
    connection = gateway.connection()
    connection.request("POST", PATH, body, {"Content-Type": "application/json", "x-api-key": session.key})
    pending = taken(session)
    assert pending.awaited
    connection.close()
    until(lambda: not pending.awaited)
    retry = Asked(gateway, session.key, body=body, x_stainless_retry_count="1")
    until(lambda: pending.awaited)
    pending.answer(reply("late"))
    assert retry.answer()[1] == {"said": "late", "to": "hi"}
    until(lambda: pending.delivered)
    assert session.counts.calls == 1


def test_a_reply_without_a_connection_waits_for_the_retry(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    body = json.dumps({"say": "hi"}).encode()
    connection = gateway.connection()
    connection.request("POST", PATH, body, {"Content-Type": "application/json", "x-api-key": session.key})
    pending = taken(session)
    connection.close()
    until(lambda: not pending.awaited)
    pending.answer(reply("kept"))
    assert not pending.delivered
    assert ask(gateway, session.key, body=body, x_stainless_retry_count="1")[1]["said"] == "kept"


def test_two_calls_at_once_are_answered_in_any_order(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    first = Asked(gateway, session.key, body={"say": "1"})
    pending = taken(session)
    second = Asked(gateway, session.key, body={"say": "2"})
    taken(session).answer(reply("b"))
    assert second.answer()[1] == {"said": "b", "to": "2"}
    pending.answer(reply("a"))
    assert first.answer()[1] == {"said": "a", "to": "1"}


def test_too_many_open_calls_are_429(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    session = gateway.sessions.open()
    monkeypatch.setattr(session, "_calls_open_max", 1)
    first = Asked(gateway, session.key)
    pending = taken(session)
    status, answer, headers = ask(gateway, session.key)
    assert status == 429 and headers["retry-after"] == "1"
    assert "wait for their replies" in answer["error"]["message"]
    pending.answer(reply("x"))
    assert first.answer()[0] == 200


def test_a_refusal_of_the_environment_has_its_status(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    asked = Asked(gateway, session.key)
    taken(session).refuse(503, "no engine")
    status, answer, headers = asked.answer()
    assert (status, answer["error"]["message"], headers["retry-after"]) == (503, "no engine", "1")


def test_a_stream_is_the_whole_reply_as_events(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    with playing(session, "a b"):
        status, content, headers = ask(gateway, session.key, body={"say": "hi", "stream": True})
    assert (status, content) == (200, b"data: a\n\ndata: b\n\ndata: [DONE]\n\n")
    assert headers["content-type"].startswith("text/event-stream")


@contextmanager
def stream_begun(gateway: Gateway) -> Iterator[tuple[PendingCall, http.client.HTTPResponse]]:
    """A stream with two comments read, whose call waits for its reply."""
    session = gateway.sessions.open()
    headers = {"Content-Type": "application/json", "x-api-key": session.key}
    with closing(gateway.connection()) as connection:
        connection.request("POST", PATH, b'{"say": "hi", "stream": true}', headers)
        pending = taken(session)
        answer = connection.getresponse()
        assert [answer.readline() for _ in range(4)] == [b": waiting\n", b"\n"] * 2
        yield pending, answer


def test_a_stream_that_waits_has_comments_and_then_the_events(gateway: Gateway) -> None:
    with stream_begun(gateway) as (pending, answer):
        pending.answer(reply("a"))
        events = answer.read().replace(b": waiting\n\n", b"")
    assert answer.status == 200
    assert events == b"data: a\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("fails", ["refuses", "has a bug"])
def test_an_error_after_a_stream_began_is_an_event(fails: str) -> None:
    with own(grace_s=0.05, keepalive_s=0.02) as gateway, stream_begun(gateway) as (pending, answer):
        if fails == "refuses":
            pending.refuse(500, "the gateway failed to find an engine")
        else:
            pending.answer(reply("bug"))
        event, data, *_ = answer.read().replace(b": waiting\n\n", b"").splitlines()
        assert (answer.status, event) == (200, b"event: error")
        assert json.loads(data.removeprefix(b"data: "))["error"]["message"].startswith("the gateway failed")
        assert len(gateway.faults) == (fails == "has a bug")


def test_an_error_before_a_stream_begins_keeps_its_status() -> None:
    with own() as gateway:
        session = gateway.sessions.open()
        asked = Asked(gateway, session.key, body={"say": "hi", "stream": True})
        taken(session).refuse(400, "too long")
        status, answer, _ = asked.answer()
        assert (status, answer["error"]["message"]) == (400, "too long")


def test_conclude_answers_waiting_and_later_calls_streamed_or_not(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    waiting = Asked(gateway, session.key)
    taken(session)
    session.conclude(closing_reply("Enough."))
    assert waiting.answer()[1]["said"] == "Enough."
    assert ask(gateway, session.key)[1]["said"] == "Enough."
    assert ask(gateway, session.key, body={"say": "", "stream": True})[1].startswith(b"data: Enough.")
    assert (session.counts.calls, session.counts.closed) == (3, 2)


def test_end_refuses_the_calls_that_wait(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    waiting = Asked(gateway, session.key)
    taken(session)
    session.end()
    assert waiting.answer()[0] == 409


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


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "words"),
    [
        ("POST", PATH, {"Content-Type": "text/plain"}, 415, "must be application/json"),
        ("POST", PATH, {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
        ("POST", PATH, {"Host": "evil.example"}, 403, "another host"),
        ("POST", "/chat/completions", {}, 404, f"POST {PATH}"),
        ("POST", "/sessions", {}, 404, "POST /sessions"),
        ("GET", PATH, {}, 405, "must be POST"),
        ("POST", "/v1/models", {}, 405, "must be GET"),
        ("DELETE", "/", {}, 404, "DELETE /"),
    ],
)
def test_other_requests_are_refused_in_words(
    gateway: Gateway, method: str, path: str, headers: dict[str, str], status: int, words: str
) -> None:
    session = gateway.sessions.open()
    given = {"Content-Type": "application/json", "x-api-key": session.key} | headers
    with closing(gateway.connection()) as connection:
        connection.request(method, path, b'{"say": "hi"}', given)
        answered, answer, _ = answer_of(connection)
    assert answered == status and words in answer["error"]["message"]
    assert session.counts.calls == 0


def test_a_head_request_has_headers_only(gateway: Gateway) -> None:
    with closing(gateway.connection()) as connection:
        connection.request("HEAD", "/")
        assert answer_of(connection)[:2] == (401, b"")
        connection.request("HEAD", "/")
        assert answer_of(connection)[0] == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/gpt-x%2Fy"])
def test_models_are_answered_and_are_no_calls(gateway: Gateway, path: str) -> None:
    session = gateway.sessions.open()
    with closing(gateway.connection()) as connection:
        connection.request("GET", path, headers={"x-api-key": session.key})
        status, answer, _ = answer_of(connection)
    assert status == 200
    model = answer if path.endswith("y") else answer["data"][0]
    assert model["id"] == ("gpt-x/y" if path.endswith("y") else "tiny")
    assert (session.counts.calls, session.counts.auxiliary) == (0, 1)


def test_an_auxiliary_path_is_answered_and_is_no_call(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    assert ask(gateway, session.key, "/v1/say/count", b"12345")[:2] == (200, {"bytes": 5})
    status, answer, _ = ask(gateway, session.key, "/v1/say/count", b"[]")
    assert (status, answer["error"]["message"]) == (400, "an empty list")
    assert (session.counts.calls, session.counts.auxiliary, session.counts.refused) == (0, 2, 1)


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


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def test_a_wait_for_a_reply_has_an_end_and_the_call_goes_on() -> None:
    with own(call_s=0.05) as gateway:
        session = gateway.sessions.open()
        status, answer, _ = ask(gateway, session.key)
        assert (status, answer["error"]["message"]) == (504, "no reply within 0.05 s")
        pending = taken(session)
        until(lambda: not pending.awaited)
        pending.answer(reply("late"))
        assert ask(gateway, session.key, x_stainless_retry_count="1")[1]["said"] == "late"


def test_the_exit_of_an_agent_wakes_its_environment(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    timer = threading.Timer(0.05, session.wake)
    timer.start()
    assert session.next_call(WAIT_S) is None
    timer.join()


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
                assert received(other).startswith(b"HTTP/1.1 503")
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
        time.sleep(0.5)
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


def test_200_sessions_ask_at_once_and_all_are_answered(gateway: Gateway) -> None:
    began_s = time.monotonic()
    opened = [gateway.sessions.open() for _ in range(200)]
    asked = [Asked(gateway, one.key, body={"say": one.key}) for one in opened]
    for num, one in reversed(list(enumerate(opened))):
        taken(one).answer(reply(str(num)))
    for num, (one, answer) in enumerate(zip(opened, asked, strict=True)):
        assert answer.answer()[1] == {"said": str(num), "to": one.key}
    assert time.monotonic() - began_s < WAIT_S
    for one in opened:
        one.end()
