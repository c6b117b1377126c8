"""Talks with one program: calls to it, answers and output from it, within bounds of bytes and time; and how
it ended, and what it left: bytes alone.

Everything that comes from the program is bytes of an adversary. JSON is read by this process's own parser,
without NaN and infinities. A byte before the call that it answers is a forgery.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from millrace.core.errors import DataError, SandboxError
from millrace_sandbox.inside.guest import MEMORY
from millrace_sandbox.inside.limits import Limits

KEYS = (
    *({"value"}, {"value", "left"}, {"value", "changed"}),
    *({"error", "memory"}, {"error", "memory", "raised"}),
)
"""Of an answer (see `guest.serve`)."""
MORE = {"number", "held", "given"}
TAIL_BYTES = 2000
ENDING_S = 0.5
MOST = 0.5
"""Who is killed after this share of its processor time has used it up: the kernel counts by ticks."""
REPORT_S = 10.0
"""How long the warden may take to kill a program and remove its directory."""


class EndOfProgram(Exception):
    """The program ends before its time: an ProgramOutcome, and why."""

    def __init__(self, outcome: ProgramOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class Program:
    """One program of a warm process, from its start to the report of its warden.

    Args:
        control: the socket of the warm process.
        as_script: the program reads its input and prints its answer; else it answers calls.
    Raises:
        SandboxError: the warm process is gone.
    """

    def __init__(self, control: socket.socket, limits: Limits, as_script: bool) -> None:
        self._limits, self._began_s = limits, time.monotonic()
        self._link, link = socket.socketpair()
        calls, self._calls = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        theirs = [calls, replies, output, link.fileno()]
        request = json.dumps({"limits": limits.to_json(), "script": as_script}).encode()
        self._sending = bytearray()
        self._received = bytearray()
        self._received_bytes = self._output_bytes = 0
        self._tail = b""
        self._open = {self._replies, self._output, self._calls}
        os.set_blocking(self._calls, False)
        try:
            socket.send_fds(control, [request], theirs)
        except OSError as error:
            self.close()
            raise SandboxError(f"the warm process of the sandbox is gone: {error}") from error
        finally:
            link.close()
            for descriptor in theirs[:3]:
                os.close(descriptor)

    @property
    def tail(self) -> str:
        """The end of what the program printed."""
        return self._tail.decode(errors="replace")

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began_s

    def send(self, message: Any, then: bytes = b"") -> None:
        """Send a message; it goes out while answers are awaited. `then` follows without a length."""
        data = json.dumps(message).encode()
        self._sending += struct.pack("<Q", len(data)) + data + then

    def read_rest(self) -> bytes:
        """Close the program's input once all is sent, and read what it still answers, until it ends.

        Raises: EndOfProgram, SandboxError.
        """
        while self._sending and self._calls in self._open:
            self._step()
        self._close(self._calls)
        while self._replies in self._open:
            self._step()
        return bytes(self._received)

    def load(self, code: str, function: str, *, given: str, plain: bool, **options: Any) -> None:
        """Have the program executed, so that it answers calls of `function` (inside/guest.py).

        Args:
            given: code of the row, which is executed before. Then nothing of the program is there yet.
            options: `sees_changes`: of a call that returns something, also tell what it has left in its
                arguments. `shared`: classes of the code that is given, whose objects pass between the program
                and its tests. `by_steps`: items of an iterator come one by one.
        Raises:
            EndOfProgram: the program raises, or ends. SandboxError.
            DataError: the code that is given raises, or ends.
        """
        begin = {"code": code, "given": given, "function": function, "plain": plain, **options}
        if given:
            try:
                why = self.ask({**begin, "code": None}).get("error")
            except EndOfProgram as end:
                why = str(end)
            if why is not None:
                raise DataError(f"the code of the prompt cannot be run, and each program needs it: {why}")
        loaded = self.ask(code if given else begin)
        if loaded.get("memory"):
            raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, loaded["error"])
        if "error" in loaded:
            raise EndOfProgram(ProgramOutcome.FAILED, loaded["error"])

    def ask(self, message: Any) -> Any:
        """Send a call, and wait for its answer: `{"value": ...}` or `{"error": ..., "memory": ...}`.

        Raises: EndOfProgram, SandboxError.
        """
        if self._received or self._readable_now():
            raise EndOfProgram(ProgramOutcome.MALFORMED, "the program answered before it was asked")
        self.send(message)
        while (reply := self._take()) is None:
            if self._replies not in self._open:
                raise EndOfProgram(ProgramOutcome.KILLED, "the program ended without an answer")
            self._step()
        return reply

    def end(self) -> tuple[ProgramOutcome | None, str, float]:
        """Have the program killed if it still runs, and wait for the report of its warden.

        Returns how it ended by itself (None: well, or not at all), why, and its CPU seconds.
        Raises: SandboxError: the warden is silent, or the sandbox could not be set up.
        """
        try:
            if self._replies not in self._open:
                self._wait_for_report()
            self._link.shutdown(socket.SHUT_WR)
            report = self._report()
            self._read_last_output()
        finally:
            self.close()
        if "broken" in report:
            raise SandboxError(f"the sandbox could not run a program: {report['broken']}")
        return *self._meaning(report), float(report["cpu_s"])

    def close(self) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)
        self._link.close()

    def _meaning(self, report: dict[str, Any]) -> tuple[ProgramOutcome | None, str]:
        limits, status = self._limits, report["status"]
        if report["ended_for"] == "time":
            return ProgramOutcome.TIMED_OUT, f"it took longer than {limits.wall_s:g} s"
        if report["ended_for"] == "disk":
            return (
                ProgramOutcome.KILLED,
                f"it wrote more than {limits.disk_bytes} bytes or {limits.files} files",
            )
        if report["ended_for"]:
            return None, ""
        if status < 0 and report["cpu_s"] >= MOST * max(1, round(limits.cpu_s)):
            return ProgramOutcome.TIMED_OUT, f"it computed for more than {limits.cpu_s:g} s"
        if status == MEMORY:
            return ProgramOutcome.OUT_OF_MEMORY, f"it needs more than {limits.memory_bytes} bytes"
        if status < 0:
            return ProgramOutcome.KILLED, f"it ended by signal {-status}"
        return (ProgramOutcome.KILLED, f"it ended with exit status {status}") if status else (None, "")

    def _wait_for_report(self) -> None:
        """A process closes its files a little before it counts as ended. Then its own end is of interest."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.poll(1000 * ENDING_S)

    def _read_last_output(self) -> None:
        """Nobody writes any more. Beyond the limit nothing is read."""
        if self._output in self._open:
            os.set_blocking(self._output, False)
        while self._output in self._open and self._output_bytes <= self._limits.output_bytes:
            try:
                self._read(self._output)
            except (BlockingIOError, EndOfProgram):
                return

    def _report(self) -> dict[str, Any]:
        self._link.settimeout(REPORT_S)
        parts = []
        try:
            while part := self._link.recv(65536):
                parts.append(part)
        except OSError as error:
            raise SandboxError(
                f"the warden of a program is silent: {error or type(error).__name__}"
            ) from error
        if not parts:
            raise SandboxError("the warden of a program ended without a report")
        report: dict[str, Any] = json.loads(b"".join(parts))
        return report

    # ------------------------------------------------------------ bytes

    def _step(self) -> None:
        """Wait for bytes in any direction, and move them. Raises EndOfProgram at the deadline."""
        left_s = self._limits.wall_s - self.wall_s
        if left_s <= 0:
            raise EndOfProgram(ProgramOutcome.TIMED_OUT, f"it took longer than {self._limits.wall_s:g} s")
        poll = select.poll()
        for descriptor in self._open - {self._calls}:
            poll.register(descriptor, select.POLLIN)
        if self._sending and self._calls in self._open:
            poll.register(self._calls, select.POLLOUT)
        for descriptor, _ in poll.poll(1000 * left_s + 1):
            if descriptor == self._calls:
                self._write()
            else:
                self._read(descriptor)

    def _write(self) -> None:
        try:
            del self._sending[: os.write(self._calls, self._sending)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._close(self._calls)

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, 65536)
        if not data:
            self._close(descriptor)
        elif descriptor == self._output:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._output_bytes += len(data)
        else:
            self._received += data
            self._received_bytes += len(data)
        if max(self._output_bytes, self._received_bytes) > self._limits.output_bytes:
            raise EndOfProgram(ProgramOutcome.KILLED, f"it wrote more than {self._limits.output_bytes} bytes")

    def _take(self) -> Any:
        """The one answer among the received bytes, or None: it is not complete."""
        if len(self._received) < 8:
            return None
        (length,) = struct.unpack("<Q", self._received[:8])
        if length > self._limits.output_bytes:
            raise EndOfProgram(ProgramOutcome.MALFORMED, f"an answer says that it has {length} bytes")
        if len(self._received) < 8 + length:
            return None
        data = bytes(self._received[8 : 8 + length])
        if len(self._received) > 8 + length:
            raise EndOfProgram(ProgramOutcome.MALFORMED, "more than one answer came to one call")
        self._received.clear()
        return parsed(data)

    def _readable_now(self) -> bool:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            os.close(descriptor)


def parsed(data: bytes) -> dict[str, Any]:
    """The answer in `data`. Raises EndOfProgram: it is none."""
    try:
        reply = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        message = f"an answer is no JSON that can be read: {type(error).__name__}: {error}"
        raise EndOfProgram(ProgramOutcome.MALFORMED, message[:300]) from None
    if not isinstance(reply, dict) or set(reply) - MORE not in KEYS:
        raise EndOfProgram(ProgramOutcome.MALFORMED, "an answer has other keys than a value, or an error")
    if "left" in reply and (reply["value"] is not None or not isinstance(reply["left"], list)):
        raise EndOfProgram(ProgramOutcome.MALFORMED, "an answer has arguments that were changed, and a value")
    if "error" in reply and not isinstance(reply["error"], str):
        raise EndOfProgram(ProgramOutcome.MALFORMED, "an error of the program is no text")
    return reply


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# ---------------------------------------------------------------- how it ended


class ProgramOutcome(Enum):
    """How a program fared. That the sandbox itself failed is no outcome: it is a SandboxError."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class CallAnswer:
    """What one call gave: a value of JSON, or the text of an exception.

    `left`: of a call that gave None, the first argument as it is then, in a list.
    """

    value: Any = None
    error: str | None = None
    left: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Execution:
    """A program that is over. All its processes are dead, and its directory is removed.

    `fault` says why it ended before its last answer; None: it did not. `stdout` is what a program without a
    function printed. `output` is the end of what it printed besides.
    """

    answers: list[CallAnswer] = field(default_factory=list)
    stdout: bytes = b""
    output: str = ""
    fault: ProgramOutcome | None = None
    reason: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
