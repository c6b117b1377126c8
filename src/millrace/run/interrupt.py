"""Signals, and the end of a process that had a run.

The first signal asks the run to finish its step and save. A Ctrl-C after it ends the run now.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

from millrace.observe.sinks.trackers import any_hangs
from millrace.runtime.process import heeded

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

    The first signal that asks for an end (`heeded`) sets `stop`. A body that has not ended `grace_s`
    (`supervision.stop_grace_s`) later is cancelled. A body without work to finish is cancelled at once.
    SIGINT after it calls `at_once` and exits. Workers notice that their parent died; the ledger is durable.
    Other signals after the first change nothing: closed terminals, `timeout` and schedulers send several, and
    mean one end.
    """
    early: list[int] = []  # signals while the loop is made: an exception would leave the loop half made
    before = {number: signal.getsignal(number) for number in heeded()}
    for number in before:
        signal.signal(number, lambda number, _: early.append(number))
    return asyncio.run(_run(body, print_line, at_once, has_work, grace_s, before, early))


async def _run(
    body: Body,
    print_line: Callable[[str], None],
    at_once: Callable[[], object],
    has_work: Callable[[], bool],
    grace_s: float,
    before: dict[int, Any],
    early: list[int],
) -> bool:
    loop, stop, received = asyncio.get_running_loop(), asyncio.Event(), list[int]()
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                with suppress(Exception):  # nothing may keep it from ending
                    at_once()
                os._exit(INTERRUPTED)
            return
        stop.set()
        if has_work():
            loop.call_later(grace_s, task.cancel)
            again = " again" if number == signal.SIGINT else ""
            print_line(f"Stopping: finishing the step and saving. Ctrl-C{again} stops at once.")
        else:
            task.cancel()
            print_line("Stopping: no step was done yet.")

    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    if early:
        on_signal(early[0])
    try:
        await body(stop)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return not stop.is_set()


def leave(code: int) -> NoReturn:
    """End this process at once if a library may keep it from its end. Ray's threads may crash a process while
    the interpreter ends. At its exit, W&B waits for its service without a deadline."""
    if "ray" in sys.modules or any_hangs():
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        os._exit(code)
    sys.exit(code)
