"""Calls to a server over HTTP, each with a deadline. Names no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Event, Thread
from typing import Any

import httpx2

from millrace.core.errors import WorkerError, boundary
from millrace.core.progress import current

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
