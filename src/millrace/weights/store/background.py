"""Background work of a relay: no call waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from millrace.core.errors import MillraceError

LOG = logging.getLogger(__name__)


class BackgroundThread:
    """Does `work` in a thread of its own after each `ask`. An `ask` during the work makes the thread work
    once more. An error ends only the work in progress, and goes to the process's log. The thread dies with
    the process."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._lock = threading.Lock()
        self._requested = self._working = False

    @property
    def idle(self) -> bool:
        """Whether all requested work is done."""
        return not self._working

    def ask(self) -> None:
        """Request the work. Returns at once. If no thread can start, the next `ask` tries again."""
        with self._lock:
            self._requested = True
            if self._working:
                return
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._working = True
            except RuntimeError as error:
                LOG.warning("cannot %s: %s", self._name, error)

    def _run(self) -> None:
        while self._take_request():
            try:
                self._work()
            except Exception:
                LOG.exception("cannot %s", self._name)

    def _take_request(self) -> bool:
        with self._lock:
            self._working, self._requested = self._requested, False
            return self._working


def reason_of(error: Exception) -> str:
    """The error's message, with its type if the error is not Millrace's."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
