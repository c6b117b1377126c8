"""Ctrl-C, twice: the first asks the run to finish what it does and save; the second ends it now."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

GRACE_S = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # the exit code of a program ended by SIGINT

Body = Callable[[asyncio.Event], Awaitable[None]]


def run_stoppable(
    body: Body,
    say: Callable[[str], None],
    *,
    at_once: Callable[[], object] = lambda: None,
    has_work: Callable[[], bool] = lambda: True,
    grace_s: float = GRACE_S,
) -> bool:
    """Run `body(stop)` on a new loop. True if it ended by itself, False if a signal asked it to.

    The first SIGINT or SIGTERM sets `stop`; a body that has not ended `grace_s` later is cancelled. One that
    has no work to finish is cancelled at once.
    The second calls `at_once` and exits: workers notice that their parent died, and the ledger is durable.
    """
    return asyncio.run(_run(body, say, at_once, has_work, grace_s))


async def _run(
    body: Body,
    say: Callable[[str], None],
    at_once: Callable[[], object],
    has_work: Callable[[], bool],
    grace_s: float,
) -> bool:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            with suppress(Exception):  # nothing may keep it from ending
                at_once()
            os._exit(INTERRUPTED)
        stop.set()
        if has_work():
            loop.call_later(grace_s, task.cancel)
            say("Stopping: finishing the step and saving. Ctrl-C again stops at once.")
        else:
            task.cancel()
            say("Stopping: no step was done yet.")

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        await body(stop)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return not stop.is_set()
