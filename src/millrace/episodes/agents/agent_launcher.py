"""The launcher as its reward worker sees it: a process, and a socket that takes requests."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from millrace.core.errors import ConfigError, WorkerError

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
