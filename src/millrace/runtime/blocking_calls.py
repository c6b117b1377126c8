"""Calls into Ray that wait. Each call has a thread of its own, which ends with the process. When the head of
the cluster is gone, the call does not return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """What `call` returns or raises. Nobody has to wait for it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio reports it

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result(value) if error is None else outcome.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = call(*args)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="a call of Ray's", daemon=True).start()
    return outcome
