"""Ctrl-C: the first asks the run to finish its step and save; the second ends the run now."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # the exit code of a program ended by SIGINT

Body = Callable[[asyncio.Event], Awaitable[None]]


def run_stoppable(
    body: Body,
    print_line: Callable[[str], None],
    *,
    at_once: Callable[[], object] = lambda: None,
    has_work: Callable[[], bool] = lambda: True,
    grace_s: float,
) -> bool:
    """Run `body(stop)` on a new loop. True if `body` ended by itself, False if a signal stopped it.

    The first SIGINT or SIGTERM sets `stop`. A body that has not ended `grace_s`
    (`supervision.stop_grace_s`) later is cancelled. A body
    without work to finish is cancelled at once.
    The second signal calls `at_once` and exits. Workers notice that their parent died; the ledger is durable.
    """
    early: list[int] = []  # signals while the loop is made: an exception would leave the loop half made
    for number in SIGNALS:
        signal.signal(number, lambda number, _: early.append(number))
    return asyncio.run(_run(body, print_line, at_once, has_work, grace_s, early))


async def _run(
    body: Body,
    print_line: Callable[[str], None],
    at_once: Callable[[], object],
    has_work: Callable[[], bool],
    grace_s: float,
    early: list[int],
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
            print_line("Stopping: finishing the step and saving. Ctrl-C again stops at once.")
        else:
            task.cancel()
            print_line("Stopping: no step was done yet.")

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if early:
        on_signal()
    try:
        await body(stop)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return not stop.is_set()
