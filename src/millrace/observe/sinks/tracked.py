"""Scalars and samples of a run for one tracker, sent from a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from millrace.core.events import Event, Events
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks.scalars import scalars_of

CLOSE_S = 30.0
"""At the end of a run, the longest wait until all trackers have what was sent."""
QUEUED_MAX = 1000


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
        self._queue: queue.Queue[tuple[Event, Mapping[str, float]] | None] = queue.Queue(QUEUED_MAX)
        self._failure = ""
        self._has_warned = False
        self._close_until_s: float | None = None
        self._thread = threading.Thread(target=self._send_all, args=(open_tracker,), name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._environment(event)
        if event.kind == "run_ended":
            self._end()
        elif event.kind == "sample":
            self._put((event, {}))
        elif scalars := scalars_of(event.kind, event.fields):
            of_step = self._environment.take_scalars() if event.kind == "step" else {}
            self._put((event, scalars | of_step))
        self._warn()

    def close(self) -> None:
        self._thread.join(max(0.0, self._end() - time.monotonic()))
        if self._thread.is_alive():
            self._failure = self._failure or f"it was not done {CLOSE_S:g} s after the end of the run"
        self._warn()

    def _end(self) -> float:
        """Nothing follows, in any tracker: all of them have the same time from now on. Returns its end."""
        if self._close_until_s is None:
            self._close_until_s = time.monotonic() + CLOSE_S
            self._put(None)
        return self._close_until_s

    def _put(self, item: tuple[Event, Mapping[str, float]] | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._failure = self._failure or (
                f"it does not keep up: {QUEUED_MAX} steps and samples wait, one was left out"
            )

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
