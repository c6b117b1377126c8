"""The agents of one worker: each has a process of its own, and a session at the gateway."""

from __future__ import annotations

import logging
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.tables.agent import AgentSection
from millrace.core.errors import DataError
from millrace.environments.gateway.agents.agent_end import AgentEnd, AgentLimits
from millrace.environments.gateway.agents.agent_process import AgentProcess
from millrace.environments.gateway.agents.agents import Agents
from millrace.environments.gateway.agents.tasks.task_directory import TaskDirectory, read_task
from millrace.environments.gateway.agents.tasks.task_tests import run_tests
from millrace.environments.gateway.dialects.paths import COUNT_TOKENS, DIALECTS, MESSAGES
from millrace.environments.gateway.open_sessions import OpenSessions
from millrace.environments.gateway.rendering import PlainRendering, Rendering
from millrace.environments.gateway.server import GatewayServer
from millrace.environments.gateway.sessions import Session, closing_reply
from millrace.environments.limits import permit_open_files
from millrace.environments.rows import Row, find_column

_log = logging.getLogger(__name__)


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
        directory: where the agents have their directories; None: that of temporary files.
    Raises:
        ConfigError: the function cannot be loaded.
        WorkerError: the launcher does not start.
    """

    def __init__(
        self, config: AgentSection, rendering: Rendering | PlainRendering, directory: Path | None
    ) -> None:
        self._config, self._rendering = config, rendering
        permit_open_files()  # an agent that waits has a link and a connection
        directory = directory or Path(tempfile.gettempdir())
        self._agents = Agents(directory, function=config.function, environment=config.variables)
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
