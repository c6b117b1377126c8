"""The warden of one agent: the agent's parent, and the adoptive parent of all that the agent leaves behind.

The warden is forked from the launcher. It speaks with the reward worker over a link of their own, in lines of
JSON. The worker sends a request, and later perhaps a byte that asks for the end. The warden answers with the
start, and later with the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from millrace.devices.left_behind import PR_SET_CHILD_SUBREAPER, end_descendants, path_of, remove_tree
from millrace.devices.syscalls import prctl
from millrace.episodes.agents.inside.agent_function import RETURNED_BYTES_MAX, AgentFunction
from millrace.episodes.agents.inside.become import become_agent
from millrace.episodes.agents.inside.bounded_output import BoundedOutput

READ_BYTES = 64 * 1024
DRAIN_BYTES_MAX = 2**20
"""The most bytes that a pipe holds when all its writers are gone."""


class AgentWarden:
    """One agent.

    Args:
        link: a socket to the worker. Its end is the worker's end.
        worker: a pidfd of the worker. A child of the worker may keep the worker's sockets open.
        function: the user's function, if agents of this launcher are calls of one.
    """

    def __init__(self, link: int, worker: int, function: AgentFunction | None) -> None:
        self._link, self._worker, self._function = link, worker, function
        self._is_killed = self._is_abandoned = False
        self._returned = bytearray()

    def work(self) -> None:
        """Ends the agent, all its descendants, and without a worker its directory too."""
        line = self._read_request()
        if not line:
            return
        request = json.loads(line)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        opened = os.open(request["directory"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            output = BoundedOutput(request["log"])
            report = self._supervise(request, output)
        except OSError as error:
            end_descendants()
            report = {"failed": f"{type(error).__name__}: {error}"}
        if self._is_abandoned:
            with suppress(OSError):
                if renamed := path_of(opened):
                    remove_tree(renamed)
                remove_tree(request["directory"])
        else:
            self._say(report)

    def _supervise(self, request: dict[str, Any], output: BoundedOutput) -> dict[str, Any]:
        printed, print_ = os.pipe()
        returned, return_ = os.pipe()
        failure, fail = os.pipe()
        may_begin, begin = os.pipe()
        began_s, warden = time.monotonic(), os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (self._link, self._worker, printed, returned, failure, begin):
                os.close(descriptor)
            os.read(may_begin, 1)
            os.close(may_begin)
            self._become(request, warden, print_, return_, fail)
        self._say({"begun": pid})  # before the agent can kill its warden
        for descriptor in (print_, return_, fail, may_begin, begin):
            os.close(descriptor)
        if broken := _read_all(failure):
            end_descendants()
            report: dict[str, Any] = json.loads(broken)
            return report
        self._say({"started": True})
        try:
            self._watch(pid, output, printed, returned)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            end_descendants()
        self._drain(output, printed, returned)
        output.close()
        return {
            "status": os.waitstatus_to_exitcode(status),
            "killed": self._is_killed,
            "last_words": output.last_words,
            "dropped": output.dropped,
            "returned": self._value(),
            "seconds": time.monotonic() - began_s,
        }

    def _watch(self, pid: int, output: BoundedOutput, printed: int, returned: int) -> None:
        """Take what the agent prints, until the agent ends, or somebody wants the end."""
        agent = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (agent, self._link, self._worker, printed, returned):
            poll.register(descriptor, select.POLLIN)
        for descriptor in (printed, returned):
            os.set_blocking(descriptor, False)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._worker in ready:
                self._is_abandoned = True
                return
            if self._link in ready:
                with suppress(ConnectionError):  # the worker ended, and had not read all
                    self._is_killed = bool(os.read(self._link, 64))
                self._is_abandoned = not self._is_killed
                return
            if agent in ready:
                return
            if printed in ready and not self._take_printed(output, printed):
                poll.unregister(printed)
            if returned in ready and not self._take_returned(returned):
                poll.unregister(returned)

    def _take_printed(self, output: BoundedOutput, printed: int) -> int:
        """The number of bytes taken; 0: nobody can print any more."""
        data = os.read(printed, READ_BYTES)
        output.add(data)
        return len(data)

    def _take_returned(self, returned: int) -> int:
        data = os.read(returned, READ_BYTES)
        self._returned += data[: RETURNED_BYTES_MAX + 1 - len(self._returned)]
        return len(data)

    def _drain(self, output: BoundedOutput, printed: int, returned: int) -> None:
        """Take what is still in the pipes. A process that is no descendant may keep them open."""
        with suppress(BlockingIOError):
            while self._take_returned(returned):
                pass
        taken = 0
        with suppress(BlockingIOError):
            while taken < DRAIN_BYTES_MAX and (count := self._take_printed(output, printed)):
                taken += count

    def _value(self) -> Any:
        if not self._returned or len(self._returned) > RETURNED_BYTES_MAX:
            return None
        try:
            return json.loads(self._returned)
        except ValueError:  # the agent ended while it was writing
            return None

    def _become(self, request: dict[str, Any], warden: int, output: int, return_: int, fail: int) -> None:
        """In the child. What goes wrong before the agent's own code goes through `fail`."""
        status, row = 1, None
        try:
            become_agent(request, warden, output)
            if (command := request["command"]) is not None:
                _execute(command, request["environment"], fail)
            row = json.loads(Path(request["arguments"]["row"]).read_bytes())
        except BaseException as error:
            _fail(fail, "failed", f"{type(error).__name__}: {error}")
        assert self._function is not None
        os.close(fail)
        try:
            sys.argv = ["agent"]
            _draw_apart()
            status = self._function.call({**request["arguments"], "row": row}, return_)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _read_request(self) -> bytes:
        """A line. Empty: the worker has ended."""
        data = b""
        while not data.endswith(b"\n"):
            part = os.read(self._link, READ_BYTES)
            if not part:
                return b""
            data += part
        return data

    def _say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with suppress(OSError):  # the worker has ended
            while data:
                data = data[os.write(self._link, data) :]


def _draw_apart() -> None:
    """Agents are copies of one process, and would all draw the same numbers. `random` sees to itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def _execute(command: list[str], environment: dict[str, str], fail: int) -> NoReturn:
    program = repr(command[0])
    try:
        os.execvpe(command[0], command, environment)
    except (FileNotFoundError, NotADirectoryError):
        why = f"there is no program {program}, or the interpreter of its first line is missing"
    except PermissionError:
        why = f"{program} may not be executed: it needs the permission to be executed (chmod +x)"
    except OSError as error:
        why = f"{program} cannot be executed: {error.strerror}"
    _fail(fail, "refused", why)


def _fail(descriptor: int, kind: str, why: str) -> NoReturn:
    os.write(descriptor, json.dumps({kind: why}).encode())
    os._exit(1)


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, READ_BYTES):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)
