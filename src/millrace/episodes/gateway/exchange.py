"""One HTTP request of an agent, from its first header to its answer.

Everything runs in short callbacks on the server's event loop. Only `settled` is called by the thread of an
environment. A stream is generated whole, and then replayed as events.
"""

from __future__ import annotations

import sys
from asyncio import TimerHandle
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from urllib.parse import unquote

import msgspec
from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine

from millrace.core.errors import DataError
from millrace.episodes.gateway import admission
from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.http_answer import HttpAnswer, retry_headers
from millrace.episodes.gateway.sessions import PendingCall, Session, call_name
from millrace.episodes.gateway.surroundings import Answer, Auxiliary, Surroundings

DRAINED_BYTES_MAX = 64 << 20
"""So much of a body that is too long is read and dropped. Then the client reads why."""
LATE_S = 1
"""After so long the retry of a call that is late joins it."""
FAULT = "the {} failed at this request; its log has the traceback"

encode = msgspec.json.encode


class Exchange(HTTPMessageDelegate):
    """A request and its answer. tornado calls the first four methods."""

    def __init__(self, around: Surroundings, connection: HTTP1Connection) -> None:
        self._around, self._connection = around, connection
        self._answer = HttpAnswer(connection, around.loop, around.writes)
        self._target = admission.Target("", "", ())
        self._headers = HTTPHeaders()
        self._session: Session | None = None
        self._pending: PendingCall | None = None
        self._refusal: RefusedCall | None = None  # until the body has been read
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._timers: list[TimerHandle] = []

    def headers_received(self, start: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        assert isinstance(start, RequestStartLine)
        self._headers = headers
        self._answer.has_content = start.method != "HEAD"
        self._target = admission.target_of(start.method, start.path, headers)
        self._connection.set_max_body_size(sys.maxsize)  # `_measure` knows the limit, and says it in words
        self._refusal = self._tried(self._admit)
        self._measure(admission.announced_bytes(headers))
        if not self._answer.over:  # a timeout of tornado's for the body would cost more at each call
            body_s = self._around.limits.body_s
            self._timers.append(self._around.loop.call_later(body_s, self._connection.stream.close))

    def data_received(self, chunk: bytes) -> None:
        self._body_bytes += len(chunk)
        self._measure(self._body_bytes)
        if self._refusal is None:
            self._body.append(chunk)

    def finish(self) -> None:
        self._cancel_timers()
        self._connection.set_close_callback(self._leave)
        self._run(self._begin)
        if self._connection.stream.closed():
            self._leave()

    def on_connection_close(self) -> None:
        self._leave()

    def settled(self) -> None:
        """The call has its outcome."""
        self._later(self._deliver)

    def refuse(self, refusal: RefusedCall) -> None:
        """Answer with an error: with its status, or in a stream that has begun as its last event."""
        if self._answer.over:
            return
        if self._session is not None:
            self._session.count_refusal(refusal)
        if self._answer.streaming:
            self._answer.end_stream(self._error(refusal, as_event=True))
        else:
            self._answer.send(refusal.status, self._error(refusal), retry_headers(refusal.retry_after_s))
        self._leave()

    def _run(self, step: Callable[[], None]) -> None:
        refusal = None if self._answer.over else self._tried(step)
        if refusal is not None:
            self.refuse(refusal)

    def _tried(self, step: Callable[[], None]) -> RefusedCall | None:
        """Why `step` failed, in words for the agent."""
        try:
            step()
        except RefusedCall as error:
            return error
        except DataError as error:
            return RefusedCall(str(error))
        except Exception as error:
            self._around.fault(error)
            return RefusedCall(FAULT.format(self._around.name), 500)
        return None

    def _later(self, step: Callable[[], None]) -> None:
        """From another thread."""
        with suppress(RuntimeError):  # the server has closed
            self._around.loop.call_soon_threadsafe(self._run, step)

    def _admit(self) -> None:
        admission.check_host(self._headers, self._around.hosts)
        self._session = self._around.sessions.find(*self._target.keys)
        posted = self._around.dialects.keys() | self._around.auxiliary.keys()
        admission.check_target(self._target, self._headers, posted, self._around.told)

    def _measure(self, num: int) -> None:
        """`num`: bytes of the body, announced or read."""
        most = self._around.limits.body_bytes_max
        if num <= most:
            return
        self._refusal = self._refusal or RefusedCall(f"the body has more than {most} bytes", 413)
        self._body.clear()
        if num > most + DRAINED_BYTES_MAX:
            self._answer.is_last = True  # tornado closes the connection, because the body is not read
            self.refuse(self._refusal)

    def _begin(self) -> None:
        """The request is here."""
        if refusal := self._refusal or self._around.end:
            raise refusal
        assert self._session is not None
        body, self._body = b"".join(self._body), []
        path = self._target.path
        if path in self._around.dialects:
            self._submit(self._session, path, body)
            return
        self._session.counts.auxiliary += 1
        if path in self._around.auxiliary:
            self._ask(self._around.auxiliary[path], self._session, body)
        elif path in self._around.told:
            self._send(self._around.told[path]())
        else:
            self._send(self._models())

    def _submit(self, session: Session, path: str, body: bytes) -> None:
        call = self._around.dialects[path].read(body)
        name = call_name(path, body, self._headers.get("Idempotency-Key", ""))
        self._pending = session.submit(call, name, repeats=admission.is_retry(self._headers))
        if session.watch(self._pending, self.settled):
            self._deliver()
            return
        self._wait()
        if call.stream:
            self._set_timer(self._around.limits.grace_s, self._keep_alive)

    def _deliver(self) -> None:
        """Answer with the outcome of the call."""
        assert self._pending is not None and self._pending.outcome is not None
        call, outcome = self._pending.call, self._pending.outcome
        if isinstance(outcome, RefusedCall):
            self.refuse(outcome)
            return
        dialect = self._around.dialects[self._target.path]
        if call.stream:
            self._answer.end_stream(b"".join(dialect.events(call, outcome)))
            self._leave(delivered=True)
        else:
            self._send(dialect.reply(call, outcome))

    def _ask(self, function: Auxiliary, session: Session, body: bytes) -> None:
        """A tokenizer takes long for a long body. So another thread calls the function."""
        self._wait()
        self._around.work(partial(self._answer_with, partial(function, session, body)))

    def _answer_with(self, function: Callable[[], Answer | Future[Answer]]) -> None:
        """Runs on that other thread, and again when the future of an answer has its outcome."""
        answers: list[Answer | Future[Answer]] = []
        refusal = self._tried(lambda: answers.append(function()))
        if refusal is not None:
            self._later(partial(self.refuse, refusal))
        elif isinstance(answer := answers[0], Future):
            answer.add_done_callback(lambda done: self._around.work(partial(self._answer_with, done.result)))
        else:
            self._later(partial(self._send, answer))

    def _models(self) -> Answer:
        """Agents know names of models of their own. Each name is the one model."""
        models, name = self._around.models, self._target.path.removeprefix(admission.MODELS).strip("/")
        return models["data"][0] | {"id": unquote(name)} if name else models

    def _send(self, answer: Answer) -> None:
        self._answer.send(200, encode(answer), {})
        self._leave(delivered=True)

    def _error(self, refusal: RefusedCall, *, as_event: bool = False) -> bytes:
        """In the form of the path's dialect, or else in OpenAI's."""
        message = str(refusal).encode(errors="replace").decode()
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": refusal.field, "code": refusal.status}
        dialect, args = self._around.dialects.get(self._target.path), (refusal.status, message, refusal.field)
        try:
            if dialect is not None:
                return dialect.error_event(*args) if as_event else encode(dialect.error(*args))
        except Exception as error_of_dialect:
            self._around.fault(error_of_dialect)
        plain = encode({"error": error})
        return b"data: " + plain + b"\n\n" if as_event else plain

    def _wait(self) -> None:
        self._around.waiting.add(self.refuse)
        self._set_timer(self._around.limits.call_s, self._be_late)

    def _set_timer(self, after_s: float, step: Callable[[], None]) -> None:
        self._timers.append(self._around.loop.call_later(after_s, self._run, step))

    def _be_late(self) -> None:
        """A call goes on, and its retry joins it."""
        retry_after_s = None if self._pending is None else LATE_S
        message = f"no reply within {self._around.limits.call_s:g} s"
        raise RefusedCall(message, 504, retry_after_s=retry_after_s)

    def _keep_alive(self) -> None:
        self._answer.keep_alive()
        self._timers.pop()
        self._set_timer(self._around.limits.keepalive_s, self._keep_alive)

    def _leave(self, *, delivered: bool = False) -> None:
        """The request is answered, or its client has gone. The call itself may go on: who was refused has no
        reply, even if one came in the meantime."""
        self._answer.over = True
        pending, self._pending = self._pending, None
        if pending is not None and self._session is not None:
            self._session.leave(pending, self.settled, delivered=delivered and self._answer.reached)
        self._around.waiting.discard(self.refuse)
        self._cancel_timers()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
