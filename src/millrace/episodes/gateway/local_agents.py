"""The agents of one worker: each has a process of its own, and a session at the gateway."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.tables.reward_kinds import AgentSection
from millrace.core.errors import DataError, writing
from millrace.episodes.agents.agent_process import AgentEnd, AgentLimits, AgentProcess, remove_directory
from millrace.episodes.agents.agents import Agents
from millrace.episodes.agents.task_directories.task_directory import TaskDirectory, read_task
from millrace.episodes.agents.task_directories.task_tests import run_tests
from millrace.episodes.gateway.dialects.anthropic_messages import MessagesDialect
from millrace.episodes.gateway.dialects.chat_completions import ChatDialect
from millrace.episodes.gateway.dialects.dialect import GatewayDialect
from millrace.episodes.gateway.dialects.plain_generate import GenerateDialect
from millrace.episodes.gateway.dialects.responses import ResponsesDialect
from millrace.episodes.gateway.dialects.text import TextDialect
from millrace.episodes.gateway.rendering import PlainRendering, Rendering
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, Session, closing_reply
from millrace.rewards.limits import permit_open_files
from millrace.tasks.rows import Row, find_column

WORKER = "worker-"
_log = logging.getLogger(__name__)


class WorkersDirectory:
    """A new directory below `parent` for the agents of this process, which holds a lock on it. Directories
    of processes that are gone are removed. Raises: StorageError."""

    def __init__(self, parent: Path) -> None:
        with writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            others = os.open(parent, os.O_RDONLY)
            try:
                _lock(others, fcntl.LOCK_EX)  # another worker may be about to lock its new directory
                for path in parent.glob(f"{WORKER}*"):
                    _remove_unless_locked(path)
                self.path = Path(tempfile.mkdtemp(prefix=WORKER, dir=parent))
                self._held = os.open(self.path, os.O_RDONLY)
                _lock(self._held, fcntl.LOCK_EX)
            finally:
                os.close(others)

    def close(self) -> None:
        """As the end of this process: the next worker removes the directory."""
        os.close(self._held)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock is held. Some file systems of networks lock no directory: nobody removes there."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _remove_unless_locked(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                remove_directory(path)
        finally:
            os.close(descriptor)


@dataclass
class LocalAgent:
    """One agent that runs here (an `agent_environment.RunningAgent`)."""

    session: Session
    process: AgentProcess
    agents: Agents
    task: TaskDirectory | None

    @property
    def time_s(self) -> float:
        return math.inf if self.task is None else self.task.agent_timeout_s

    def wait(self, timeout_s: float) -> AgentEnd | None:
        self.process.wait(timeout_s)
        return self.process.end

    def tests(self) -> float | None:
        """The reward that the tests of the task directory write. Raises: RewardError: there is none."""
        return None if self.task is None else run_tests(self.agents, self.task, self.process.directory)

    def conclude(self) -> None:
        self.session.conclude(closing_reply())

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.session.end()
        self.process.close()


class LocalAgents:
    """Starts agents, in processes that a launcher forks, and the gateway that they ask.

    Args:
        directory: where the agents have their directories, also of this worker alone; None: that of
            temporary files.
    Raises:
        ConfigError: the function cannot be loaded.
        WorkerError: the launcher does not start.
    """

    def __init__(
        self,
        config: AgentSection,
        rendering: Rendering | PlainRendering,
        directory: Path | WorkersDirectory | None,
    ) -> None:
        self._config, self._rendering = config, rendering
        permit_open_files()  # an agent that waits has a link and a connection
        self._directory = directory  # held as long as this worker lives
        path = directory.path if isinstance(directory, WorkersDirectory) else directory
        self._agents = Agents(
            path or Path(tempfile.gettempdir()), function=config.function, environment=config.variables
        )
        self._sessions = OpenSessions()
        auxiliary = {COUNT_TOKENS: self._counted}
        self._server = GatewayServer(self._sessions, DIALECTS, auxiliary=auxiliary, on_fault=_log.error)
        self._server.start()

    def start(self, row: Row) -> LocalAgent:
        """Raises: ConfigError, DataError, WorkerError: as `Agents.start` and `read_task`."""
        task = None
        if (column := self._config.task_directory) is not None:
            if not isinstance(path := find_column(row, column), str):
                raise DataError(
                    f"`reward.agent.task_directory`: the row has no `{column}`, only {sorted(row)}"
                )
            task = read_task(path)
            row = {**row, "instruction": task.instruction}
        session = self._sessions.open()
        try:
            process = self._agents.start(
                self._config.command or None,
                row,
                base_url=self._server.url,
                key=session.key,
                limits=AgentLimits(memory_mb=self._config.memory_mb),
                prepare=None if task is None else task.lay_out,
                on_exit=lambda _: session.wake(),
            )
        except BaseException:
            session.end()
            raise
        return LocalAgent(session, process, self._agents, task)

    def _counted(self, _: Session, body: bytes) -> dict[str, Any]:
        call = MESSAGES.read_count(body)
        return MESSAGES.counted(len(self._rendering.whole(call.messages, call.tools)))


MESSAGES = MessagesDialect()
DIALECTS: dict[str, GatewayDialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": TextDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": GenerateDialect(),
}
COUNT_TOKENS = "/v1/messages/count_tokens"
"""Answered by `MESSAGES.read_count` and `MESSAGES.counted`. A count is no turn."""
