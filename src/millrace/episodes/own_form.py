"""Environments with `reset(row)` and `step(action)`, plain or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from millrace.tasks.rows import Row


class EpisodeLoop:
    """Waits for what async methods return, in one event loop for the whole episode: a client of the user's
    may stay open between two turns. No other episode has this loop, so none waits for its methods."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def result(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_awaited(returned))

    def close(self, environment: Any) -> None:
        """Call `close` of the environment, if it has one."""
        with suppress(Exception):
            self.result(getattr(environment, "close", lambda: None)())
        if self._runner is not None:
            self._runner.close()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


class OwnEnvironment:
    def __init__(self, kind: type) -> None:
        self._own, self._loop = kind(), EpisodeLoop()

    def reset(self, row: Row) -> Any:
        return self._loop.result(self._own.reset(row))

    def step(self, action: str) -> Any:
        return self._loop.result(self._own.step(action))

    def snapshot(self) -> Any:
        return self._loop.result(self._own.snapshot())

    def restore(self, row: Row, snapshot: bytes) -> None:
        self._loop.result(self._own.restore(row, snapshot))

    def close(self) -> None:
        self._loop.close(self._own)
