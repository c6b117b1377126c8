"""The answer to one HTTP request: whole, or a stream of events that may begin before its content is known."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import Any

from tornado.concurrent import Future
from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPHeaders, ResponseStartLine, responses

from millrace.episodes.gateway.dialects.shapes import KEEP_ALIVE

SEND_S = 60.0
"""A client that does not read its answer for so long is left."""
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


def retry_headers(retry_after_s: int | None) -> dict[str, str]:
    """What an SDK is told of a refused request. None: it must not ask again, whatever the status."""
    return {"x-should-retry": "false"} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


class HttpAnswer:
    """`writes` gets the write of an answer that the client has yet to read."""

    def __init__(
        self, connection: HTTP1Connection, loop: AbstractEventLoop, writes: set[Future[Any]]
    ) -> None:
        self._connection, self._loop, self._writes = connection, loop, writes
        self.streaming = self.over = self.reached = False
        self.has_content = True
        """Not of a HEAD request."""
        self.is_last = False
        """The connection ends with this answer."""

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        more = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        more |= {"Connection": "close"} if self.is_last else {}
        self._end(self._head(status, more | headers, content if self.has_content else b""))

    def keep_alive(self) -> None:
        """Begin the stream, if it has not begun. Clients skip the comment."""
        if self.streaming:
            self._connection.write(KEEP_ALIVE)
        else:
            self._connection.stream.set_nodelay(True)
            self._head(200, EVENTS, KEEP_ALIVE)
            self.streaming = True

    def end_stream(self, content: bytes) -> None:
        """`content`: all events. A stream that has not begun says its length, so that a client never takes a
        part for the whole."""
        if self.streaming:
            self._end(self._connection.write(content))
        else:
            self._end(self._head(200, EVENTS | {"Content-Length": str(len(content))}, content))

    def _head(self, status: int, headers: dict[str, str], content: bytes) -> Future[None]:
        line = ResponseStartLine("HTTP/1.1", status, responses.get(status, "Unknown"))
        return self._connection.write_headers(line, HTTPHeaders(headers), content)

    def _end(self, written: Future[None]) -> None:
        self.over = True
        stream = self._connection.stream
        self.reached = not stream.closed()  # where a client wants one answer alone, `finish` closes it
        self._connection.finish()
        if stream.writing():
            cut = self._loop.call_later(SEND_S, stream.close)
            self._writes.add(written)
            written.add_done_callback(lambda _: cut.cancel())
            written.add_done_callback(self._writes.discard)
