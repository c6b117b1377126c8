"""One agent that runs, as its reward worker sees it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.devices.left_behind import path_of, remove_tree
from millrace.episodes.agents.agent_end import AgentEnd
from millrace.episodes.agents.inside.bounded_output import LAST_BYTES

DIRECTORY = "agents"
"""Of a run: the working directories of agents that run."""
LOG = "agent.log"
"""The file of the working directory that has what the agent prints."""
END_S = 10.0
"""A killed agent is gone within this time."""
READ_BYTES = 2**18
_log = logging.getLogger(__name__)


class AgentProcess:
    """An agent, from its start to `close`. `Agents` makes it. Every method may be called from any thread.

    Args:
        link: the socket to the warden. `Agents` reads it.
        directory: the working directory.
        opened: the same directory, open. `close` removes the directory, and closes this. None: it is left.
        on_exit: called once, in the thread that watches all agents. So it must return at once.
    """

    def __init__(
        self,
        link: socket.socket,
        directory: Path,
        *,
        opened: int | None = None,
        on_exit: Callable[[AgentEnd], None] | None = None,
    ) -> None:
        self.directory, self.pid = directory, 0
        self._link, self._opened, self._on_exit = link, opened, on_exit
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._end: AgentEnd | None = None
        self._unread = b""
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    @property
    def end(self) -> AgentEnd | None:
        """How the agent ended; None: it runs."""
        return self._end

    @property
    def last_words(self) -> str:
        """The end of what the agent printed. While the agent runs: the end of agent.log."""
        return self._end.last_words if self._end is not None else self._end_of_log()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end. Returns the exit code, -N for signal N, or None: the agent still runs."""
        if not self._ended.wait(timeout_s):
            return None
        assert self._end is not None
        if self._end.signal is not None:
            return -int(signal.Signals[self._end.signal])
        return self._end.exit_code

    def kill(self) -> None:
        """Ask for the end of the agent and all its descendants. `wait` says when they are gone."""
        with self._lock, suppress(OSError):
            self._link.send(b"1")

    def close(self) -> None:
        """Kill the agent if it runs, and remove its directory. A second call does nothing."""
        if self.is_running:
            self.kill()
            if not self._ended.wait(END_S):
                _log.warning("an agent (process %d) was killed, and is not gone after %g s", self.pid, END_S)
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            remove_directory(self.directory, opened)
            os.close(opened)

    def receive(self) -> dict[str, Any] | None:
        """The next message of the warden, read with the link's timeout; empty: the warden is gone; None: the
        message is not complete."""
        if b"\n" not in self._unread:
            part = self._link.recv(READ_BYTES)
            if not part:
                return {}
            self._unread += part
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def finish(self, report: dict[str, Any]) -> None:
        """The warden's last message. An empty message: the warden was killed, and so the agent."""
        status = report.get("status", -signal.SIGKILL)
        self._end = AgentEnd(
            exit_code=status if status >= 0 else None,
            signal=_signal_name(-status) if status < 0 else None,
            killed=report.get("killed", False),
            last_words=report["last_words"] if "last_words" in report else self._end_of_log(),
            dropped_bytes=report.get("dropped", 0),
            directory=str(self.directory),
            returned=report.get("returned"),
            seconds=report.get("seconds", time.monotonic() - self._began_s),
        )
        with self._lock:
            self._link.close()
        self._ended.set()
        if self._on_exit is not None:
            try:
                self._on_exit(self._end)
            except Exception:
                _log.exception("the end of an agent could not be passed on")

    def _end_of_log(self) -> str:
        try:
            with open(os.open(self.directory / LOG, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
                return file.read(LAST_BYTES).decode(errors="replace")
        except OSError:
            return ""


def remove_directory(directory: Path, opened: int | None = None) -> None:
    """Remove an agent's directory, also under the name that the agent gave it.

    Args:
        opened: the directory, open since before the agent could rename it.
    """
    try:
        if opened is not None and (renamed := path_of(opened)) not in ("", str(directory)):
            remove_tree(renamed)
        remove_tree(str(directory))
    except OSError as error:
        _log.warning("the directory %s of an agent cannot be removed: %s", directory, error)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "SIGKILL"
