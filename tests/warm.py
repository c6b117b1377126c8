"""Forkservers for the runs of tests, forked out of one process that has imported what they preload.

A forkserver of its own imports torch and transformers before it forks a run's first worker, for seconds. Here
one process does so for all runs of a test session. What it forks becomes the child of the controller, as a
forkserver must be, and is `runtime.forkserver` from its first line on.

Run as `python warm.py FD`, with FD one end of a SOCK_SEQPACKET pair. A request is what a
forkserver inherits from its controller, with its socket; the answer is its pid.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from millrace.runtime import forkserver, process
from millrace.runtime.launcher import DEFAULTS
from millrace.session.compose import PRELOAD

MODULES = (*PRELOAD, "reasoning_gym", "transformers.models.qwen3.modeling_qwen3")
MAX_PACKET = 128 * 1024


class Forked:
    """A child that is no `Popen`, but can be killed and awaited like one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Warm:
    """The process that has imported everything. It ends with this one, or when it is closed."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
            )
        if not self._control.recv(MAX_PACKET):
            raise RuntimeError("it ended while it imported")

    def start(self, theirs: socket.socket) -> Forked:
        """A forkserver at that end of its control socket, in place of `launcher._start`."""
        os.umask(umask := os.umask(0))
        inherited = {"environ": {**DEFAULTS, **os.environ}, "umask": umask, "directory": os.getcwd()}
        process._prctl(process.PR_SET_CHILD_SUBREAPER, 1)  # so that it becomes our child
        try:
            socket.send_fds(self._control, [json.dumps(inherited).encode()], [theirs.fileno()])
            pid = int(self._control.recv(MAX_PACKET))
        finally:
            process._prctl(process.PR_SET_CHILD_SUBREAPER, 0)
        return Forked(pid)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def main() -> None:
    control, controller = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    for name in MODULES:
        importlib.import_module(name)
    control.send(b"ready")
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if not packet:
            os._exit(0)  # without a shutdown of everything imported
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _be_forkserver(control, controller, json.loads(packet), fds[0])
            os._exit(0)  # its child goes to the controller, which adopts orphans at this moment
        os.waitpid(between, 0)
        os.close(fds[0])


def _be_forkserver(control: socket.socket, controller: int, inherited: dict[str, Any], fd: int) -> None:
    with process.ending_at_once():
        while os.getppid() != controller:
            time.sleep(0.001)
        os.setpgid(0, 0)
        control.send(str(os.getpid()).encode())
        control.close()
        os.environ.clear()
        os.environ.update(inherited["environ"])
        os.umask(inherited["umask"])
        os.chdir(inherited["directory"])
        sys.argv = [forkserver.__name__, str(fd)]
        forkserver.main()


if __name__ == "__main__":
    main()
