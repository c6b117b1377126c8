"""The addresses of a served model: HTTP/1.0, a thread a connection, errors in OpenAI's form.

On the loopback interface the Host header must be ours, and a body must say that it is JSON. So no page of a
browser can ask: it would have to ask for leave first, and is not answered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any

from millrace.core.errors import DataError, DeadlineExceeded, WorkerError
from millrace.serve.completions import Completions, RefusedRequest
from millrace.serve.shared_engine import EngineFull

LOOPBACK = "127.0.0.1"
BODY_BYTES_MAX = 4 << 20
DRAINED_BYTES_MAX = 64 << 20
"""So much of a body that is too long is read and dropped."""
SILENCE_S = 10.0
"""A client that neither sends nor reads for so long is left."""
END_S = 2.0
"""Answers under way at the end may take so long."""


class Endpoints(ThreadingHTTPServer):
    """A server that listens from the start, and answers between `serve_forever` and `close`.

    Args:
        connections_max: further connections are closed at once.
    Raises: OSError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, completions: Completions, *, connections_max: int) -> None:
        self.completions, self.connections_max = completions, connections_max
        self._places = BoundedSemaphore(connections_max)
        super().__init__((host, port), _Handler)
        port = self.server_address[1]
        self.hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"} if host in (LOOPBACK, "localhost") else None

    def close(self) -> None:
        """Listen no more, and let answers under way end."""
        self.shutdown()
        self.server_close()
        until_s = time.monotonic() + END_S
        for _ in range(self.connections_max):
            if not self._places.acquire(timeout=max(0.0, until_s - time.monotonic())):
                return

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that left is no error
            super().handle_error(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Handler(BaseHTTPRequestHandler):
    server: Endpoints
    timeout = SILENCE_S
    server_version, sys_version = "millrace", ""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        completions = self.server.completions
        self._answer({"/health": completions.health, "/v1/models": completions.models})

    def do_POST(self) -> None:
        completions = self.server.completions
        self._answer({"/v1/chat/completions": completions.chat, "/v1/completions": completions.text})

    def _answer(self, answers: dict[str, Callable[..., dict[str, Any]]]) -> None:
        """`answers`: of each path; those to POST take the body."""
        try:
            self._send(200, self._result(answers))
        except RefusedRequest as error:
            self._refuse(error.status, error, field=error.field)
        except DataError as error:
            self._refuse(400, error)
        except EngineFull as error:
            self._refuse(503, error, {"Retry-After": "1"})
        except DeadlineExceeded as error:
            self._refuse(504, error)
        except WorkerError as error:
            self._refuse(503, error)
        except OSError:
            raise
        except Exception as error:  # a bug: its traceback follows
            self._refuse(500, error)
            raise

    def _result(self, answers: dict[str, Callable[..., dict[str, Any]]]) -> dict[str, Any]:
        """The body is read first: a client that still sends may miss why it is refused."""
        given = [self._body()] if self.command == "POST" else []
        if self.server.hosts and self.headers.get("Host") not in self.server.hosts:
            raise RefusedRequest("the Host header names another host", 403)
        if given and self.headers.get_content_type() != "application/json":
            raise RefusedRequest("the Content-Type must be application/json", 415)
        if self.path not in answers:
            raise RefusedRequest(f"{self.command} {self.path}: there is {' and '.join(answers)}", 404)
        return answers[self.path](*given)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise RefusedRequest("the request has no Content-Length", 411)
        if int(length) > BODY_BYTES_MAX:
            left = min(int(length), DRAINED_BYTES_MAX)
            while left > 0 and (dropped := self.rfile.read(min(left, BODY_BYTES_MAX))):
                left -= len(dropped)
            raise RefusedRequest(f"the body has {length} bytes, and may have {BODY_BYTES_MAX}", 413)
        return self.rfile.read(int(length))

    def _refuse(
        self, status: int, error: Exception, headers: dict[str, str] | None = None, field: str | None = None
    ) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        answer = {"message": str(error), "type": kind, "param": field, "code": status}
        self._send(status, {"error": answer}, headers)

    def _send(self, status: int, answer: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        more = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        self.send_response(status)
        for name, value in (more | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
