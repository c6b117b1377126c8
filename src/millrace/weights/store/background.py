"""Work of a relay that nobody waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from millrace.core.errors import MillraceError

LOG = logging.getLogger(__name__)


class BackgroundThread:
    """Does `work` in a thread of its own whenever somebody asks. What is asked for while it works is done
    once more, after that. An error ends the work of that time only, and the process's log has it. The thread
    dies with the process."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._lock = threading.Lock()
        self._asked = self._working = False

    @property
    def idle(self) -> bool:
        """Whether all that was asked for is done."""
        return not self._working

    def ask(self) -> None:
        """Returns at once. Where no thread can be had, the next one who asks tries again."""
        with self._lock:
            self._asked = True
            if self._working:
                return
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._working = True
            except RuntimeError as error:
                LOG.warning("cannot %s: %s", self._name, error)

    def _run(self) -> None:
        while self._is_asked():
            try:
                self._work()
            except Exception:
                LOG.exception("cannot %s", self._name)

    def _is_asked(self) -> bool:
        with self._lock:
            asked, self._asked = self._asked, False
            self._working = asked
            return asked


def told(error: Exception) -> str:
    """In words."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
