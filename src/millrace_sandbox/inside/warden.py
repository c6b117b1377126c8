"""The warden of one program: it forks the program's process, ends it, and tells how it ended.

The warden is outside of the program's namespaces or filter. It never reads a byte that the program wrote.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from millrace.devices.left_behind import PR_SET_CHILD_SUBREAPER, end_descendants, remove_tree
from millrace.devices.syscalls import prctl
from millrace_sandbox.inside import guest, namespaces, tester
from millrace_sandbox.inside.limits import Limits

LOOK_S = 0.02
"""Between two looks at a private directory on a disk."""


class Warden:
    """One program at `level`.

    Args:
        descriptors: calls (read), replies (write), output (write), and the link to who asked for the
            program. The link is closed there when the program is to end.
    """

    def __init__(self, level: str, limits: Limits, readable: list[str], descriptors: list[int]) -> None:
        self._level, self._limits, self._readable = level, limits, readable
        self._calls, self._replies, self._output, self._link = descriptors

    def work(self, as_script: bool, proc: int | None, base: str) -> None:
        """Run the program. Report `{"status": ..., "cpu_s": ..., "ended_for": ...}`, or `{"broken": why}`."""
        private = None
        try:
            if proc is not None:
                namespaces.for_program(self._limits, proc)
                directory = namespaces.PRIVATE
            else:
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                directory = private = f"{base}/{os.getpid()}"
                os.mkdir(private, 0o700)
                os.chdir(private)
            report = self._supervise(as_script, directory, private)
        except Exception as error:
            report = {"broken": f"{type(error).__name__}: {error}"}
        try:
            if private is not None:
                remove_tree(private)
        except OSError as error:
            report = {"broken": f"the private directory cannot be removed: {error}"}
        with suppress(OSError):
            os.write(self._link, json.dumps(report).encode())

    def _supervise(self, as_script: bool, directory: str, private: str | None) -> dict[str, Any]:
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            self._become_program(as_script, directory, tell)
        os.close(tell)
        for descriptor in (self._calls, self._replies, self._output):
            os.close(descriptor)
        try:
            broken = _read_all(ready)
            ended_for = "" if broken else self._watch(pid, private)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            end_descendants()
        if broken:
            return {"broken": broken.decode(errors="replace")}
        code = os.waitstatus_to_exitcode(status)
        return {"status": code, "cpu_s": usage.ru_utime + usage.ru_stime, "ended_for": ended_for}

    def _watch(self, pid: int, private: str | None) -> str:
        """Wait for the end of the program or of its permission. Returns why it must end, if it must."""
        deadline_s = time.monotonic() + self._limits.wall_s
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(self._link, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            found = dict(poll.poll(1000 * (left_s if private is None else min(left_s, LOOK_S)) + 1))
            if handle in found:
                return ""
            if found:
                return "stopped"
            if private is not None and self._is_too_large(private):
                return "disk"
        return "time"

    def _is_too_large(self, private: str) -> bool:
        size, files = 0, 0
        try:
            for directory, names, others in os.walk(private):
                files += len(names) + len(others)
                for name in others:
                    with suppress(OSError):
                        size += os.lstat(f"{directory}/{name}").st_blocks * 512
                if size > self._limits.disk_bytes or files > self._limits.files:
                    return True
        except RecursionError:  # directories in directories
            return True
        return False

    def _become_program(self, as_script: bool, directory: str, tell: int) -> None:
        """In the child. Whatever goes wrong before the program is locked up goes through `tell`."""
        try:
            prctl(guest.PR_SET_PDEATHSIG, signal.SIGKILL)
            arrange_descriptors(
                {0: self._calls, 1: self._replies, 2: self._output, 3: os.memfd_create("input"), 4: tell}
                if as_script
                else {0: 0, 1: self._output, 2: self._output, 3: self._calls, 4: self._replies, 5: tell}
            )
            tell = 4 if as_script else 5
            guest.lock(self._level, self._limits, self._readable, directory)
            os.close(tell)
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        try:
            program = guest.receive(0 if as_script else guest.CALLS)
            tester.run(program) if "names" in program else guest.run(program)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)


def arrange_descriptors(wanted: dict[int, int]) -> None:
    """Afterwards exactly the descriptors `wanted` are open: the number of each, and what it is now."""
    above = 64
    copies = {number: os.dup2(now, above + number) for number, now in wanted.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)
    os.closerange(len(wanted), os.sysconf("SC_OPEN_MAX"))


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 4096):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)
