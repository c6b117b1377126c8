"""A server on this machine that answers each request with the next of its replies, in the path's dialect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millrace.episodes.gateway.calls import Call, RefusedCall, Reply
from millrace.episodes.gateway.dialects.shapes import KEEP_ALIVE
from millrace.episodes.gateway.local_agents import COUNT_TOKENS, DIALECTS, MESSAGES

NUM_TOKENS = 7
"""The answer to each request to count tokens."""


class StubGateway:
    """`url` without `/v1`. `bodies` are the requests as they came, `calls` as they were read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.replies: list[Reply] = []
        self.fails_in_stream = False
        self.bodies: list[tuple[str, bytes]] = []
        self.calls: list[Call] = []


@contextmanager
def serving() -> Iterator[StubGateway]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    gateway = server.gateway = StubGateway(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20

    def do_POST(self) -> None:
        gateway: StubGateway = self.server.gateway  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        gateway.bodies.append((path, body))
        if path == COUNT_TOKENS:
            gateway.calls.append(MESSAGES.read_count(body))
            return self._json(200, MESSAGES.counted(NUM_TOKENS))
        dialect = DIALECTS[path]
        try:
            call = dialect.read(body)
        except RefusedCall as refused:
            return self._json(refused.status, dialect.error(refused.status, str(refused), refused.field))
        gateway.calls.append(call)
        reply = gateway.replies.pop(0)
        if not call.stream:
            return self._json(200, dialect.reply(call, reply))
        events = (
            [dialect.error_event(500, "broken")] if gateway.fails_in_stream else dialect.events(call, reply)
        )
        content = b"".join([KEEP_ALIVE, *events])
        self._send(200, "text/event-stream; charset=utf-8", content)

    def _json(self, status: int, body: object) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written."""
