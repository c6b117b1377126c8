"""Calls to a server over HTTP, each with a deadline, and requests that stream tokens, on a thread of their
own. Names no torch.

The engine's thread sends requests, ends them, and takes the tokens that have arrived. An ended request sends
no more tokens: when `end` returns, the last of its tokens has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import httpx2
import msgspec

from millrace.core.errors import WorkerError, boundary
from millrace.core.progress import current
from millrace.engines.server.server_dialect import Dialect, Sampled

ANSWER_S = 20.0  # for an answer that the server only looks up
WORK_S = 60.0  # for an answer that the server computes, or that waits for the end of a step
LOAD_S = 600.0  # for a load, while the server answers that it lives
LOOK_S = 5.0  # between two looks whether it lives
FRESH = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection for each request: a server may close an idle one just when a request is sent on it."""
ERROR_CHARS_MAX = 500  # characters of an error's text


class Client:
    """A client of one server. Every method raises WorkerError, which names the server, if the answer is late
    or an error, or if there is no answer. `program`: the software of the server."""

    program = "a server"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.Client(base_url=self.url, trust_env=False, limits=FRESH)

    def close(self) -> None:
        self._client.close()

    def has(self, path: str) -> bool:
        """Whether the server answers a GET of `path`."""
        return self._ask("GET", path, WORK_S, known=False).is_success

    @contextmanager
    def _alive_meanwhile(self, check: Callable[[], object]) -> Iterator[None]:
        """While the server loads, the call of this replica counts each `check` that the server passes."""
        ended, call = Event(), current()

        def look() -> None:
            while not ended.wait(LOOK_S):
                with suppress(WorkerError):
                    check()
                    call.count()

        looking = Thread(target=look, name="server lives", daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()

    def _answer(self, key: str, method: str, path: str, timeout_s: float, **arguments: Any) -> Any:
        """The value under `key` of an answer in JSON."""
        answer = self._ask(method, path, timeout_s, **arguments)
        with self._understood(path):
            return answer.json()[key]

    def _understood(self, path: str) -> AbstractContextManager[None]:
        doing = f"{path} does not answer as {self.program} does"
        return boundary(f"server {self.url}", doing, WorkerError)

    def _ask(
        self, method: str, path: str, timeout_s: float, *, known: bool = True, **arguments: Any
    ) -> httpx2.Response:
        """Not `known`: the server may have no such route."""
        call = f"server {self.url}: {method} {path}"
        try:
            answer = self._client.request(method, path, timeout=timeout_s, **arguments)
        except httpx2.TimeoutException as error:
            raise WorkerError(f"{call}: no answer within {timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise WorkerError(f"{call}: {type(error).__name__}: {error}") from error
        if answer.is_error and (known or answer.status_code != 404):
            raise WorkerError(f"{call}: {answer.status_code}: {answer.text[:ERROR_CHARS_MAX]}")
        return answer


# ---------------------------------------------------------------- streams


CONNECT_S = 10.0
TOKEN_S = 600.0  # from one token of a request to its next: with a full cache it waits for other requests
CLOSE_S = 30.0


class StreamedTokens(msgspec.Struct, frozen=True):
    """A part of request `key` that has arrived. `error`: in words; then no more parts come."""

    key: int
    part: Sampled = Sampled()
    error: str | None = None


class Streams:
    """The streamed requests of one engine to `server`. `_serve` owns them, on a thread of its own."""

    def __init__(self, server: Dialect) -> None:
        self._server = server
        self._arrived: SimpleQueue[StreamedTokens] = SimpleQueue()
        self._ready = Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), name="streams", daemon=True)
        self._thread.start()
        if not self._ready.wait(CLOSE_S):
            raise WorkerError(
                f"server {server.url}: the thread that reads from it did not start in {CLOSE_S:g} s"
            )

    # ------------------------------------------------------------ from the engine's thread

    def send(self, key: int, request: dict[str, Any]) -> None:
        """Send `request`, whose `key` must be new or ended."""
        self._loop.call_soon_threadsafe(self._start, key, request)

    def take(self, keys: Collection[int] = (), *, wait_s: float = 0.0) -> list[StreamedTokens]:
        """Everything that has arrived. Waits for something of each of `keys`, for `wait_s` at most."""
        arrived: list[StreamedTokens] = []
        missing, until_s = set(keys), time.monotonic() + wait_s
        with suppress(Empty):
            while missing:
                arrived.append(self._arrived.get(timeout=max(0.0, until_s - time.monotonic())))
                missing.discard(arrived[-1].key)
        with suppress(Empty):
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def end(self, keys: Iterable[int], *, after_s: float = 0.0) -> None:
        """Close the requests that have not ended by themselves after `after_s`: the server aborts them."""
        ended: Future[None] = Future()
        self._loop.call_soon_threadsafe(self._start_end, list(keys), after_s, ended)
        ended.result(timeout=after_s + CLOSE_S)

    def close(self) -> None:
        """End every request. A second call changes nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(timeout=CLOSE_S)

    # ------------------------------------------------------------ on its own

    async def _serve(self) -> None:
        """The owner of every request; ends with `close`."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        client = httpx2.AsyncClient(base_url=self._server.url, trust_env=False, limits=FRESH)
        async with client, asyncio.TaskGroup() as group:
            self._client, self._group = client, group
            self._ready.set()
            await self._closing.wait()
            for task in self._tasks.values():
                task.cancel()

    def _start(self, key: int, request: dict[str, Any]) -> None:
        task = self._tasks[key] = self._group.create_task(self._read(key, request))
        task.add_done_callback(lambda ended: self._forget(key, ended))

    def _forget(self, key: int, ended: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is ended:
            del self._tasks[key]

    def _start_end(self, keys: list[int], after_s: float, ended: Future[None]) -> None:
        tasks = [self._tasks.pop(key) for key in keys if key in self._tasks]
        self._group.create_task(self._end(tasks, after_s, ended))

    @staticmethod
    async def _end(tasks: list[asyncio.Task[None]], after_s: float, ended: Future[None]) -> None:
        if tasks and after_s:
            await asyncio.wait(tasks, timeout=after_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        ended.set_result(None)

    async def _read(self, key: int, request: dict[str, Any]) -> None:
        """Read one request to its end. An error arrives as a `StreamedTokens` too."""
        timeout = httpx2.Timeout(TOKEN_S, connect=CONNECT_S)
        route, read, finished = self._server.generate, self._server.open_reader(), False
        try:
            async with self._client.sse(route, method="POST", json=request, timeout=timeout) as source:
                if source.response.is_error:
                    text = (await source.response.aread()).decode(errors="replace")
                    raise ValueError(f"{source.response.status_code}: {text[:ERROR_CHARS_MAX]}")
                async for event in source:
                    if event.data != "[DONE]":
                        part = read(event.data)
                        finished |= part.finish_reason is not None
                        self._arrived.put(StreamedTokens(key, part))
            if not finished:
                raise ValueError("its stream ended, and the request had not")
        except Exception as error:
            self._arrived.put(StreamedTokens(key, error=f"{type(error).__name__}: {error}"))
