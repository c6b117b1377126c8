"""A gateway with a small dialect, and agents that ask it over real HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from millrace.episodes.gateway.calls import Call, RefusedCall, Reply
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, PendingCall, Session
from millrace.episodes.gateway.surroundings import GatewayLimits

PATH = "/v1/say"
WAIT_S = 120.0
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

    def error(self, status: int, message: str, field: str | None = None) -> dict[str, Any]:
        return {"type": "error", "error": {"message": message, "status": status, "field": field}}

    def error_event(self, status: int, message: str, field: str | None = None) -> bytes:
        return f"event: error\ndata: {json.dumps(self.error(status, message, field))}\n\n".encode()


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


@contextmanager
def own(**limits: Any) -> Iterator[Gateway]:
    gateway = Gateway(**limits)
    try:
        yield gateway
    finally:
        gateway.server.close()
