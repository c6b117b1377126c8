"""The launcher: one process of a reward worker, with one thread, that forks a warden for each agent.

The launcher is started anew (never forked), and so has no thread or lock of the worker. It imports the user's
module once. It ends with the worker, however the worker ends.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from millrace.core.errors import MillraceError
from millrace.devices.left_behind import PR_SET_CHILD_SUBREAPER
from millrace.devices.syscalls import MEANT, prctl
from millrace.episodes.agents.inside.agent_function import AgentFunction
from millrace.episodes.agents.inside.agent_warden import AgentWarden
from millrace.episodes.agents.inside.become import PR_SET_PDEATHSIG

SIGNALS = tuple(signal.valid_signals() - MEANT)
"""Ignored here: the end of the worker is the only end."""
END_S = 5.0
"""The wardens have this long to end after the worker."""
REFUSAL_CHARACTERS_MAX = 8000


def main(descriptor: int, worker_pid: int, path: str | None) -> None:
    """Serve requests on the socket `descriptor` until it is closed, or the worker has ended.

    The first message says `{"ready": names of threads}`, or `{"refused": why}`. A request is one byte and the
    link of a new warden.

    Args:
        path: the function of which agents are calls; None: agents are commands.
    """
    control = socket.socket(fileno=descriptor)
    worker = os.pidfd_open(worker_pid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the thread that waits for the first message is the parent
    if os.getppid() != worker_pid:
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _loosen_limits()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    try:
        function = None if path is None else AgentFunction(path)
    except MillraceError as error:
        control.send(json.dumps({"refused": str(error)[:REFUSAL_CHARACTERS_MAX]}).encode())
        return
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    prctl(PR_SET_PDEATHSIG, 0)  # from now on `worker` shows the end
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": threads}).encode())
    forks = Forks(control, worker, function)
    try:
        forks.serve()
    finally:
        forks.end()


class Forks:
    """The wardens of this launcher. A warden's pidfd shows its end."""

    def __init__(self, control: socket.socket, worker: int, function: AgentFunction | None) -> None:
        self._control, self._worker, self._function = control, worker, function
        self._wardens: dict[int, int] = {}  # pidfd -> process id
        self._poll = select.poll()
        for descriptor in (control.fileno(), worker):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> None:
        """Waits for requests and for ends of wardens. Ends with the worker."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._worker in ready:
                return
            for descriptor in ready:
                if descriptor in self._wardens:
                    self._reap(descriptor)
                elif descriptor == self._control.fileno():
                    message, links, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not message:
                        return
                    self._begin(links[0])

    def end(self) -> None:
        """Wait for the wardens, who see the worker's end too. Kill those that remain, and their agents."""
        deadline_s = time.monotonic() + END_S
        while self._wardens and (left_s := deadline_s - time.monotonic()) > 0:
            poll = select.poll()
            for descriptor in self._wardens:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(1000 * left_s):
                self._reap(descriptor)
        for pid in self._wardens.values():
            os.kill(pid, signal.SIGKILL)
        for descriptor in list(self._wardens):
            self._reap(descriptor)

    def _begin(self, link: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                os.write(link, json.dumps({"failed": f"no process can be had: {error}"}).encode() + b"\n")
            os.close(link)
            return
        if pid == 0:
            try:
                self._control.close()
                for descriptor in self._wardens:
                    os.close(descriptor)
                AgentWarden(link, self._worker, self._function).work()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        os.close(link)
        pidfd = os.pidfd_open(pid)
        self._wardens[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        """A warden leaves no child. If something killed the warden, the launcher adopts the children."""
        pid = self._wardens.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            self._end_adopted()

    def _end_adopted(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s:
            known = set(self._wardens.values())
            adopted = [pid for pid in map(int, children.read_text().split()) if pid not in known]
            for pid in adopted:
                os.kill(pid, signal.SIGKILL)
            for pid in adopted:
                os.waitpid(pid, 0)
            if not adopted:
                return


def _loosen_limits() -> None:
    """Undo the soft limits that a reward worker has set for itself."""
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (hard, hard))
