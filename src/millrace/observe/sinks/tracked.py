"""Scalars and samples of a run for one tracker, sent from a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from millrace.core.events import Event, Events
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks.scalars import scalars_of

CLOSE_S = 30.0
"""At the end of a run, the longest wait for all trackers together until they have what was sent."""
QUEUED_MAX = 1000
_THREAD = "tracker "


class Tracker(Protocol):
    """One run in a tracking service. One thread makes it and calls it."""

    def log_sample(self, event: Event) -> None: ...

    def log_scalars(self, event: Event, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracked:
    """A sink. Its thread opens the tracker and waits for it, so a tracker that fails or hangs never delays or
    ends the run. The first failure is one `warned` event. Replays are left out: their curves are there."""

    def __init__(self, events: Events, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._events, self._name = events, name
        self._environment = EnvironmentUse()
        self._queue: queue.Queue[tuple[Event, Mapping[str, float]] | None] = queue.Queue()
        self._failure = ""
        self._has_warned = self._has_ended = False
        self.done: Future[None] = Future()
        thread = threading.Thread(target=self._work, args=(open_tracker,), name=_THREAD + name, daemon=True)
        thread.start()

    def __call__(self, event: Event) -> None:
        self._environment(event)
        if event.kind == "run_ended":
            self.end()
        elif event.kind == "sample":
            self._put((event, {}))
        elif scalars := scalars_of(event.kind, event.fields):
            of_step = self._environment.take_scalars() if event.kind == "step" else {}
            self._put((event, scalars | of_step))
        self._warn()

    def end(self) -> None:
        """Nothing follows: once the tracker has what waits, it is closed, and `done` is set."""
        if not self._has_ended:
            self._has_ended = True
            self._queue.put(None)

    def close(self) -> None:
        if not self.done.done():
            self._failure = self._failure or (
                f"it was not done at the end of the run, and got {CLOSE_S:g} s more at most"
            )
        self._warn()

    def _put(self, item: tuple[Event, Mapping[str, float]]) -> None:
        if self._queue.qsize() < QUEUED_MAX:
            self._queue.put(item)
        else:
            self._failure = self._failure or (
                f"it does not keep up: {QUEUED_MAX} steps and samples wait, one was left out"
            )

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            self._send_all(open_tracker)
        finally:
            self.done.set_result(None)

    def _send_all(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
        except BaseException as error:
            self._fail(error, "gets nothing until the run is resumed")
            return
        while (item := self._queue.get()) is not None:
            try:
                self._send(tracker, *item)
            except Exception as error:
                self._fail(error, f"did not get all of version {item[0].fields['version']}")
        try:
            tracker.close()
        except Exception as error:
            self._fail(error, "may not have all of the run")

    def _send(self, tracker: Tracker, event: Event, scalars: Mapping[str, float]) -> None:
        if event.kind == "sample":
            tracker.log_sample(event)
        else:
            tracker.log_scalars(event, scalars)

    def _fail(self, error: BaseException, effect: str) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._failure = self._failure or f"it {effect}, the run goes on: {text:.500}"

    def _warn(self) -> None:
        if self._failure and not self._has_warned:
            self._has_warned = True
            self._events.emit("warned", source=self._name, reason=self._failure)


async def end_all(trackers: Sequence[Tracked]) -> None:
    """Wait until all trackers are done, for `CLOSE_S` at most. Signals are obeyed meanwhile. A cancellation
    ends the wait alone, so that how the run ended stays known."""
    for tracker in trackers:
        tracker.end()
    if trackers:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([asyncio.wrap_future(one.done) for one in trackers], timeout=CLOSE_S)


def any_hangs() -> bool:
    """A tracker of this process is not done."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())
