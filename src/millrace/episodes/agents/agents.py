"""All agents of one reward worker: their launcher, and the thread that sees their ends."""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError, WorkerError, writing
from millrace.episodes.agents.agent_process import (
    LOG,
    MEMORY_MB,
    AgentEnd,
    AgentLauncher,
    AgentLimits,
    AgentProcess,
    remove_directory,
)
from millrace.episodes.agents.agent_row import absolute, agent_variables, filled, plain_variables, row_json

START_S = 60.0
"""An agent starts within this time, on a machine that is busy with other agents."""
_ADVICE = "Free space there, or name another directory."

OnExit = Callable[[AgentEnd], None]


class Agents:
    """Starts agents, one process each, and each in a fresh directory below `directory`.

    Args:
        function: `file.py:name` or `package.module:name`; agents are calls of this function. None: agents are
            commands.
        environment: the user's own variables, for every agent.
    Raises:
        ConfigError: the function cannot be loaded.
        WorkerError: the launcher does not start.
    """

    def __init__(
        self, directory: Path, *, function: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._directory, self._function = directory.absolute(), function
        self._environment = dict(environment or {})
        with writing(self._directory, _ADVICE):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._launcher: AgentLauncher | None = self._launch()
        self._watch = _Watch()

    def start(
        self,
        command: Sequence[str] | None,
        row: Mapping[str, Any],
        *,
        base_url: str,
        key: str,
        limits: AgentLimits | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[Path], None] | None = None,
        on_exit: OnExit | None = None,
    ) -> AgentProcess:
        """Start an agent. Returns when its program runs.

        Args:
            command: with `{column}` for columns of the row. None: call the function.
            base_url: of the gateway, without `/v1`.
            environment: more variables, for this agent alone.
            prepare: puts files into the working directory before the start.
            on_exit: called in the thread that watches all agents, perhaps before this method returns.
        Raises:
            ConfigError: the command cannot be executed.
            DataError: the row cannot be given to the agent.
            WorkerError: there is no process to be had.
        """
        data = row_json(row)
        if command is not None:
            command = filled(absolute(command, Path.cwd()), row)
        with writing(self._directory, _ADVICE):
            directory = Path(tempfile.mkdtemp(prefix="agent-", dir=self._directory))
            opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if prepare is not None:
                prepare(directory)
            path = str(directory / "row.json")
            with writing(path, _ADVICE):
                Path(path).write_bytes(data)
            variables = agent_variables(
                {**self._environment, **(environment or {})},
                os.environ,
                base_url=base_url,
                key=key,
                row_path=path,
            )
            arguments = {"row": path, "base_url": base_url.rstrip("/"), "key": key}
            return self._started(
                _request(command, directory, directory / LOG, variables, limits, arguments),
                lambda link: AgentProcess(link, directory, opened=opened, on_exit=on_exit),
            )
        except BaseException:
            remove_directory(directory, opened)
            os.close(opened)
            raise

    def run_beside(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        log: Path,
        environment: Mapping[str, str],
        limits: AgentLimits | None = None,
        timeout_s: float,
    ) -> AgentEnd:
        """Run another command in the directory of an agent that has ended. It does not know the gateway.

        What the command prints goes into the file `log`. After `timeout_s` the command is killed, and the end
        says so. Raises: as `start`.
        """
        variables = plain_variables({**self._environment, **environment}, os.environ)
        process = self._started(
            _request(command, directory, log, variables, limits, {}),
            lambda link: AgentProcess(link, directory),
        )
        try:
            process.wait(timeout_s)
        finally:
            process.close()
        if process.end is None:
            raise WorkerError(f"{command[0]} was killed after {timeout_s:g} s, and does not end")
        return process.end

    def close(self) -> None:
        """Kill all agents, and end the launcher and the thread. Directories go with each agent's `close`."""
        running = self._watch.running()
        for process in running:
            process.kill()
        for process in running:
            process.close()
        with self._lock:
            if self._launcher is not None:
                self._launcher.close()
                self._launcher = None
        self._watch.close()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> AgentLauncher:
        return AgentLauncher(self._function, plain_variables(self._environment, os.environ))

    def _started(
        self, request: dict[str, Any], make: Callable[[socket.socket], AgentProcess]
    ) -> AgentProcess:
        """Have a warden start the agent. If the launcher has ended, once more with a new launcher."""
        if request["command"] is None and self._function is None:
            raise ConfigError("an agent needs a command, or a function that the launcher has imported")
        data = json.dumps(request).encode() + b"\n"
        for _ in range(2):
            link = self._linked()
            process = make(link)
            try:
                message = _start(process, link, data)
            except OSError as error:
                link.close()
                if isinstance(error, TimeoutError):
                    raise WorkerError(f"an agent did not start within {START_S:g} s") from None
                continue
            if "started" in message:
                link.setblocking(False)
                self._watch.add(process, link)
                return process
            link.close()
            if "refused" in message:
                raise ConfigError(f"the agent cannot be started: {message['refused']}")
            if "failed" in message:
                raise WorkerError(f"an agent cannot be started: {message['failed']}")
        raise WorkerError("an agent cannot be started: its launcher ended, twice")

    def _linked(self) -> socket.socket:
        """A link to a new warden."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, self._lock:
            if self._launcher is None:
                ours.close()
                raise WorkerError("an agent cannot be started: the worker is ending")
            try:
                self._launcher.begin(theirs)
            except OSError:  # it was killed
                self._launcher.close()
                self._launcher = None
                self._launcher = self._launch()
                self._launcher.begin(theirs)
        ours.settimeout(START_S)
        return ours


class _Watch:
    """One thread that reads the links of all agents that run."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._processes: dict[int, AgentProcess] = {}
        self._stop, self._stopped = os.pipe()
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._work, name="agents", daemon=True)
        self._thread.start()

    def add(self, process: AgentProcess, link: socket.socket) -> None:
        self._processes[link.fileno()] = process
        try:
            self._epoll.register(link, select.EPOLLIN)
        except ValueError:
            link.close()
            raise WorkerError("an agent cannot be started: the worker is ending") from None

    def running(self) -> list[AgentProcess]:
        return list(self._processes.values())

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        self._epoll.close()

    def _work(self) -> None:
        """Waits for reports of wardens. Ends at `close`."""
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop:
                    return
                try:
                    report = self._processes[descriptor].receive()
                except BlockingIOError:
                    continue
                except (OSError, ValueError):
                    report = {}
                if report is not None:
                    self._epoll.unregister(descriptor)
                    self._processes.pop(descriptor).finish(report)


def _request(
    command: Sequence[str] | None,
    directory: Path,
    log: Path,
    variables: dict[str, str],
    limits: AgentLimits | None,
    arguments: dict[str, str],
) -> dict[str, Any]:
    return {
        "command": None if command is None else list(command),
        "directory": str(directory),
        "log": str(log),
        "environment": variables,
        "limits": msgspec.to_builtins(limits or AgentLimits(memory_mb=MEMORY_MB)),
        "arguments": arguments,
    }


def _start(process: AgentProcess, link: socket.socket, request: bytes) -> dict[str, Any]:
    """The warden's word on the start. An agent that began to run may end its warden: it has started, once.

    Raises: OSError: the launcher or the warden has ended, and no agent began.
    """
    link.sendall(request)
    while True:
        message = process.receive()
        if message is None:
            continue
        if "begun" in message:
            process.pid = message["begun"]
        else:
            return {"started": True} if not message and process.pid else message
