"""The server that agents ask for turns: HTTP on an address of its own, in a thread of its own.

Environments are blocking code, one thread each. Their side is `episodes.gateway.sessions`.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPConnection, HTTPServerConnectionDelegate
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets

from millrace.core.errors import DeadlineExceeded
from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.dialects.dialect import GatewayDialect
from millrace.episodes.gateway.exchange import Exchange
from millrace.episodes.gateway.sessions import OpenSessions
from millrace.episodes.gateway.surroundings import Auxiliary, GatewayLimits, Surroundings, Told

LOOPBACK = "127.0.0.1"
START_S = 10.0
END_S = 2.0
"""Answers under way at the end may take so long. So may an auxiliary function."""
BACKLOG = 1024
READ_BYTES_MAX = 1 << 20
"""A connection holds so many bytes that no request has taken yet."""
FULL = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    'Connection: close\r\n\r\n{{"error": {{"message": "the {} has too many connections"}}}}'
)


class GatewayServer:
    """A server between `start` and `close`. `url` is without `/v1`, and has no key.

    Args:
        dialects: of each path, such as `/v1/chat/completions`.
        auxiliary: of each path, a function of the session and the body. Its requests are no calls.
        told: of each path, what GET gives, beside the list of models.
        model: the one name in that list.
        name: of the server, in words for its clients and in names of its threads.
        on_fault: gets the traceback of a bug. The agent gets status 500.
    """

    def __init__(
        self,
        sessions: OpenSessions,
        dialects: Mapping[str, GatewayDialect],
        *,
        auxiliary: Mapping[str, Auxiliary] | None = None,
        told: Told | None = None,
        model: str = "millrace",
        name: str = "gateway",
        limits: GatewayLimits | None = None,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.url = ""
        self.port = 0
        self._limits = limits or GatewayLimits()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._surround = partial(
            Surroundings,
            sessions=sessions,
            dialects=dialects,
            auxiliary=auxiliary or {},
            told=told or {},
            name=name,
            limits=self._limits,
            models=model_list(model),
            work=self._work.put,
            on_fault=on_fault,
        )
        self._on_fault, self._name = on_fault, name
        self._threads: list[threading.Thread] = []
        self._around: Surroundings | None = None
        self._stop = asyncio.Event()
        self._closing = False

    @property
    def faults(self) -> int:
        return self._around.faults if self._around else 0

    def start(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Raises: OSError: the port is taken, or the host is not here. DeadlineExceeded: no thread ran."""
        sockets = bind_sockets(port, host, family=socket.AF_INET, backlog=BACKLOG)
        self.port = sockets[0].getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(host, sockets, started.put), name=self._name),
            threading.Thread(target=self._do_work, name=f"{self._name}-auxiliary"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        try:
            error = started.get(timeout=START_S)
        except queue.Empty:
            error = DeadlineExceeded(f"the {self._name} at {self.url} did not start within {START_S:g} s")
        if error is not None:
            self.close()
            raise error

    def close(self) -> None:
        """Answer what waits with an error, and end every connection, socket and thread.

        Raises: DeadlineExceeded: a dialect or an auxiliary function does not return.
        """
        self._closing = True
        until_s = time.monotonic() + 2 * END_S + 1.0
        if self._around is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._around.loop.call_soon_threadsafe(self._stop.set)
        self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            raise DeadlineExceeded(f"the {self._name} at {self.url} is closed, but threads still run: {left}")

    def _serve(
        self, host: str, sockets: list[socket.socket], started: Callable[[BaseException | None], None]
    ) -> None:
        try:
            asyncio.run(self._listen(host, sockets, started))
        except BaseException as error:
            started(error)
            self._on_fault(f"the {self._name} ended:\n{traceback.format_exc()}")
        finally:
            for one in sockets:
                one.close()

    async def _listen(
        self, host: str, sockets: list[socket.socket], started: Callable[[BaseException | None], None]
    ) -> None:
        """Accept connections until `close`."""
        local = host in (LOOPBACK, "localhost")
        hosts = frozenset({f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"}) if local else None
        around = self._surround(hosts=hosts, loop=asyncio.get_running_loop())
        listener = _Listener(
            _Exchanges(around),
            idle_connection_timeout=self._limits.idle_s,
            max_header_size=self._limits.header_bytes_max,
            max_buffer_size=READ_BYTES_MAX,
        )
        listener.connections_max = self._limits.connections_max
        listener.full = FULL.format(self._name).encode()
        listener.add_sockets(sockets)
        self._around = around
        started(None)
        try:
            if not self._closing:
                await self._stop.wait()
        finally:
            listener.stop()
            around.end = RefusedCall(f"the {self._name} is closing", 503)
            for refuse in list(around.waiting):
                refuse(around.end)
            if around.writes:
                await asyncio.wait(around.writes, timeout=END_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await listener.close_all_connections()

    def _do_work(self) -> None:
        """Run auxiliary functions, one after another, until `close`."""
        while (work := self._work.get()) is not None:
            work()


class _Listener(HTTPServer):
    connections_max, full = 0, b""

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        if len(self._connections) < self.connections_max:
            super().handle_stream(stream, address)
        else:
            stream.write(self.full)
            stream.close()


class _Exchanges(HTTPServerConnectionDelegate):
    """An exchange for each request."""

    def __init__(self, around: Surroundings) -> None:
        self.start = partial(Exchange, around)

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> Exchange:
        return self.start(cast(HTTP1Connection, request_conn))

    def on_close(self, server_conn: object) -> None: ...


def model_list(name: str) -> dict[str, Any]:
    """What OpenAI's and Anthropic's SDKs read alike."""
    began = int(time.time())
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
    model = {"id": name, "object": "model", "created": began, "owned_by": "millrace"}
    model |= {"type": "model", "display_name": name, "created_at": at}
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
