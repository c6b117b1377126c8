"""The gateway over real HTTP: keys, retries and streams."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from tests.gateways import (
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

from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.local_agents import DIALECTS
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, PendingCall, closing_reply
from millrace.episodes.gateway.surroundings import GatewayLimits


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateway]:
    gateway = Gateway(grace_s=0.05, keepalive_s=0.02, body_bytes_max=100_000)
    yield gateway
    gateway.server.close()


@pytest.fixture
def gateway(shared: Gateway) -> Iterator[Gateway]:
    yield shared
    assert not shared.faults


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


@pytest.mark.parametrize("stream", [False, True])
def test_an_equal_body_on_a_connection_for_one_request_is_a_new_call(gateway: Gateway, stream: bool) -> None:
    """urllib asks for the end of the connection each time."""
    session = gateway.sessions.open()
    with playing(session) as calls:
        for _ in range(3):
            body = {"say": "hi", "stream": stream}
            assert ask(gateway, session.key, body=body, Connection="close")[0] == 200
    assert len(calls) == 3 and session.counts.replayed == 0


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


def test_a_refusal_of_the_environment_has_its_status(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    asked = Asked(gateway, session.key)
    taken(session).refuse(RefusedCall("no engine", 503, retry_after_s=7))
    status, answer, headers = asked.answer()
    assert (status, answer["error"]["message"], headers["retry-after"]) == (503, "no engine", "7")


@pytest.mark.parametrize("status", [400, 404, 409, 413, 429, 500, 503, 504])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_without_a_wait_tells_sdks_to_stop(status: int, stream: bool) -> None:
    with own() as gateway:
        session = gateway.sessions.open()
        asked = Asked(gateway, session.key, body={"say": "hi", "stream": stream})
        taken(session).refuse(RefusedCall("never", status))
        answered, _, headers = asked.answer()
        assert (answered, headers["x-should-retry"]) == (status, "false") and "retry-after" not in headers


@pytest.mark.parametrize("status", [408, 429, 500, 503, 504])
def test_a_refusal_with_a_wait_names_it(gateway: Gateway, status: int) -> None:
    session = gateway.sessions.open()
    asked = Asked(gateway, session.key)
    taken(session).refuse(RefusedCall("later", status, retry_after_s=60))
    answered, _, headers = asked.answer()
    assert (answered, headers["retry-after"]) == (status, "60") and "x-should-retry" not in headers


def test_a_field_to_blame_is_named_to_the_agent(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    asked = Asked(gateway, session.key)
    taken(session).refuse(RefusedCall("too many", field="stop"))
    assert asked.answer()[1]["error"]["field"] == "stop"


def test_a_stream_is_the_whole_reply_as_events(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    with playing(session, "a b"):
        status, content, headers = ask(gateway, session.key, body={"say": "hi", "stream": True})
    assert (status, content) == (200, b"data: a\n\ndata: b\n\ndata: [DONE]\n\n")
    assert headers["content-length"] == str(len(content)), "a part of it is none of the whole"
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
        assert [answer.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
        yield pending, answer


def test_a_stream_that_waits_has_comments_and_then_the_events(gateway: Gateway) -> None:
    with stream_begun(gateway) as (pending, answer):
        pending.answer(reply("a"))
        events = answer.read().replace(b": keep-alive\n\n", b"")
    assert answer.status == 200
    assert events == b"data: a\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("fails", ["refuses", "has a bug"])
def test_an_error_after_a_stream_began_is_an_event(fails: str) -> None:
    with own(grace_s=0.05, keepalive_s=0.02) as gateway, stream_begun(gateway) as (pending, answer):
        if fails == "refuses":
            pending.refuse(RefusedCall("the gateway failed to find an engine", 500))
        else:
            pending.answer(reply("bug"))
        event, data, *_ = answer.read().replace(b": keep-alive\n\n", b"").splitlines()
        assert (answer.status, event) == (200, b"event: error")
        assert json.loads(data.removeprefix(b"data: "))["error"]["message"].startswith("the gateway failed")
        assert len(gateway.faults) == (fails == "has a bug")


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("ends", ["refused", "closed", "server"])
def test_a_stream_that_has_begun_ends_with_the_error_of_its_dialect(path: str, ends: str) -> None:
    messages = [{"role": "user", "content": "?"}]
    asked = {"messages": messages, "input": messages, "token_ids": [3], "prompt": "?"}
    needed = {"generate": "token_ids", "responses": "input"}.get(
        path.rpartition("/")[2], "prompt" if path == "/v1/completions" else "messages"
    )
    body = json.dumps({needed: asked[needed], "stream": True, "max_tokens": 9})
    sessions = OpenSessions()
    server = GatewayServer(sessions, DIALECTS, limits=GatewayLimits(grace_s=0.0, keepalive_s=0.02))
    server.start()
    session = sessions.open()
    headers = {"Content-Type": "application/json", "x-api-key": session.key}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        connection.request("POST", path, body, headers)
        pending = taken(session)
        answer = connection.getresponse()
        assert answer.readline() == b": keep-alive\n"
        {
            "refused": lambda: pending.refuse(RefusedCall("no engine", 503)),
            "closed": session.end,
            "server": server.close,
        }[ends]()
        name, *rest = answer.read().replace(b": keep-alive\n\n", b"").strip().split(b"\n")
    server.close()
    data = json.loads((rest or [name])[-1].removeprefix(b"data: "))
    words = {"refused": "no engine", "closed": "this episode has ended", "server": "the gateway is closing"}
    assert data["error"]["message"] == words[ends], "an SDK raises what has a field `error`"
    named = path in ("/v1/messages", "/v1/responses")
    assert (name == b"event: error") == named == (data.get("type") == "error") and len(rest) == named


def test_who_was_refused_has_no_reply_even_if_one_came_at_that_moment() -> None:
    with own(call_s=0.05) as gateway:
        session = gateway.sessions.open()
        assert ask(gateway, session.key)[0] == 504
        pending = taken(session)
        pending.answer(reply("late"))
        assert not pending.delivered
        assert ask(gateway, session.key)[1]["said"] == "late"
        until(lambda: pending.delivered)
    assert (session.counts.calls, session.counts.replayed) == (1, 1)


def test_an_error_before_a_stream_begins_keeps_its_status() -> None:
    with own() as gateway:
        session = gateway.sessions.open()
        asked = Asked(gateway, session.key, body={"say": "hi", "stream": True})
        taken(session).refuse(RefusedCall("too long"))
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


def test_the_exit_of_an_agent_wakes_its_environment(gateway: Gateway) -> None:
    session = gateway.sessions.open()
    timer = threading.Timer(0.05, session.wake)
    timer.start()
    assert session.next_call(WAIT_S) is None
    timer.join()


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
