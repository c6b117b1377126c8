"""One agent that runs, as its reward worker sees it: its launcher, its process, its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError, WorkerError
from millrace.devices.left_behind import path_of, remove_tree
from millrace.episodes.agents.inside.bounded_output import LAST_BYTES

MEMORY_MB = 4096
"""For whoever has no number of their own."""


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of each process of an agent; None: no bound.

    `memory_mb` counts private writable memory (RLIMIT_DATA). An agent that is a function may use so much
    beyond what its imports take. The number of processes has no bound: the kernel counts them per user.
    """

    memory_mb: int | None
    open_files: int = 1024
    cpu_s: int | None = None


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when an agent's first process has ended.

    `signal` is a name such as "SIGKILL", and `exit_code` is then None. `killed`: the worker asked for the
    end. `last_words` are the last 64 KiB of stdout and stderr together. `dropped_bytes` were printed, and
    agent.log had no room for them. `returned` is what a function returned, as JSON has it.
    """

    exit_code: int | None
    signal: str | None
    killed: bool
    last_words: str
    dropped_bytes: int
    directory: str
    returned: Any
    seconds: float


START_S = 120.0
"""The launcher starts within this time, the imports of the user's module included."""
END_S = 10.0
_START = (
    "import sys, json; arguments, sys.path = json.loads(sys.argv[1]); "
    "from millrace.episodes.agents.inside.forked_agents import main; main(*arguments)"
)
_log = logging.getLogger(__name__)


class AgentLauncher:
    """One launcher (inside/forked_agents.py). What the module of a user prints at its import goes to the
    stderr of this process.

    Args:
        path: the function of which agents are calls; None: agents are commands.
        variables: the environment variables of the launcher.
    Raises:
        ConfigError: the function cannot be loaded.
        WorkerError: the launcher does not start.
    """

    def __init__(self, path: str | None, variables: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [[theirs.fileno(), os.getpid(), path], sys.path]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=dict(variables),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise WorkerError(f"no launcher of agents can be started: {error}") from error
        finally:
            theirs.close()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, link: socket.socket) -> None:
        """Have a warden forked at the other end of `link`. Raises: OSError: the launcher has ended."""
        socket.send_fds(self._control, [b"1"], [link.fileno()])

    def close(self) -> None:
        """End the launcher, and agents that still run."""
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        self._control.settimeout(START_S)
        try:
            said = json.loads(self._control.recv(2**16) or b"{}")
        except TimeoutError:
            self._process.kill()
            raise WorkerError(
                f"the launcher of agents did not start within {START_S:g} s. "
                "The module of the agent must be importable within that time."
            ) from None
        except OSError as error:
            raise WorkerError(f"the launcher of agents cannot be reached: {error}") from error
        if "refused" in said:
            raise ConfigError(said["refused"])
        if "ready" not in said:
            raise WorkerError("the launcher of agents ended at its start: its stderr says why")
        if said["ready"]:
            _log.warning(
                "the agent's module started threads at its import: %s. No agent has these threads, and a "
                "lock that such a thread holds stays locked. Start threads inside the function.",
                ", ".join(said["ready"]),
            )


DIRECTORY = "agents"
"""Of a run: the working directories of agents that run."""
LOG = "agent.log"
"""The file of the working directory that has what the agent prints."""
"""A killed agent is gone within this time."""
READ_BYTES = 2**18


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
