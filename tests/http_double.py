"""What doubles of servers share: JSON and streams over HTTP, a thread a request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Part = tuple[list[tuple[int, float]], str | None]
"""Of a stream: new tokens with their log-probs, and the reason why they are the last."""


class JsonHandler(BaseHTTPRequestHandler):
    """A subclass answers in `take`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.take(urlsplit(self.path).path, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.take(urlsplit(self.path).path, json.loads(body) if body else {})

    def take(self, path: str, given: dict[str, Any]) -> None: ...

    def answer(self, answer: Any, status: int = 200) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    # ------------------------------------------------------------ streams

    def stream(self, chunks: Iterable[Any]) -> None:
        """Without an end: `end_stream` follows."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.say(chunk)

    def end_stream(self, *, done: bool) -> None:
        if done:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def say(self, chunk: Any) -> None:
        self._chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serving(handler: type[JsonHandler], port: int = 0, **state: Any) -> Iterator[str]:
    """The URL of a server, whose handlers have `state` as attributes."""
    http = _Http(("127.0.0.1", port), type("Handler", (handler,), state))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
