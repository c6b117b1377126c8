"""The process in whose main thread plain reward functions run.

A thread would not do: alarms and handlers of signals are refused there, and so is `asyncio.get_event_loop`;
libraries with time limits of their own fail, and a reward that catches the error says 0 to everything.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from millrace.core.errors import DeadlineExceeded, MillraceError, OutOfMemory, RewardError
from millrace.core.types import Failed, Score
from millrace.devices.syscalls import prctl
from millrace.rewards.limits import limit_process_memory
from millrace.rewards.rewards import Reward
from millrace.rewards.scores import shortened
from millrace.tasks.rows import Row

PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
ENDED_S = 5.0


Arguments = tuple[str, Any, Row]
"""A completion, the answer and the columns of its row."""
ScoreFunction = Callable[[Any, Arguments, float, asyncio.AbstractEventLoop], Score]
"""Calls a reward, in so many seconds. The loop does not run. Raises: OutOfMemory."""


@dataclass(frozen=True, slots=True)
class MadeReward:
    """A reward that the process has made, by its number."""

    number: int
    name: str
    is_async: bool


class RewardProcess:
    """A fork of this process. It makes rewards, and calls one at a time. This process loads nothing of them.

    If it ends by itself, this process ends in the same way: a reward that ends its process ends its worker.
    It ends with this process, and with this object.

    Args:
        make: makes the reward of a configuration. The process inherits what this function holds.
        score: calls a reward with arguments.
    """

    def __init__(self, make: Callable[[Any], Reward], score: ScoreFunction) -> None:
        # The kernel ends the process with the thread that forks it. This thread lives as long as the object.
        self._thread = ThreadPoolExecutor(1, "reward")
        self._pid, self._channel = self._thread.submit(_fork, make, score).result()
        self._end = weakref.finalize(self, _end, self._pid, self._channel)

    def make(self, config: Any) -> MadeReward:
        """Make the reward of a configuration there. Raises: what making it raises."""
        made: MadeReward = self._ask(("make", config))
        return made

    def limit_memory(self, extra_mb: int) -> None:
        """Let the memory of the process grow by so much from now on."""
        self._ask(("limit", extra_mb))

    async def score(self, number: int, arguments: Arguments, ends_s: float, too_long: str) -> Score:
        """Raises: OutOfMemory; DeadlineExceeded: the process is over its deadline, and was killed."""
        loop = asyncio.get_running_loop()
        left_s = ends_s - loop.time()
        try:
            async with asyncio.timeout_at(ends_s):
                score: Score = await loop.run_in_executor(
                    self._thread, self._exchange, ("score", number, arguments, left_s)
                )
        except TimeoutError:
            self.end()
            raise DeadlineExceeded(too_long) from None
        return score

    def end(self) -> None:
        self._end()

    def _ask(self, message: tuple[Any, ...]) -> Any:
        return self._thread.submit(self._exchange, message).result()

    def _exchange(self, message: tuple[Any, ...]) -> Any:
        try:
            packed = pickle.dumps(message)
        except Exception as error:  # any object of a row may refuse
            return Failed(f"the row cannot be sent to the process of the reward: {shortened(error)}")
        try:
            _send(self._channel, packed)
            answer = pickle.loads(_receive(self._channel))
        except (EOFError, OSError):
            if not self._end.alive:
                raise DeadlineExceeded("the process of the reward was ended") from None
            _end_alike(self._pid)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _fork(*functions: Any) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with warnings.catch_warnings():  # the process has threads, and none of them holds a lock of Python here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _serve(theirs, *functions)
    finally:
        os._exit(1)


def _serve(
    channel: socket.socket,
    make: Callable[[Any], Reward],
    score: ScoreFunction,
) -> None:
    """Answer until the parent is gone. This is the main thread of the new process."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # as its worker, it is ended by SIGKILL
    _leave_sockets(channel.fileno())
    rewards, loop = list[Reward](), asyncio.new_event_loop()
    while True:
        try:
            message = pickle.loads(_receive(channel))
        except (EOFError, OSError):
            return
        loop = asyncio.new_event_loop() if loop.is_closed() else loop
        asyncio.set_event_loop(loop)  # a function may have set another, or none
        try:
            match message:
                case ("make", config):
                    rewards.append(reward := make(config))
                    answer: Any = MadeReward(len(rewards) - 1, reward.name, reward.is_async)
                case ("limit", extra_mb):
                    answer = None
                    limit_process_memory(extra_mb)
                case ("score", number, arguments, left_s):
                    answer = score(rewards[number], arguments, left_s, loop)
        except BaseException as error:  # not even SystemExit may leave
            answer = _crossing(error)
        _send(channel, pickle.dumps(answer))


def _crossing(error: BaseException) -> BaseException:
    """The error if it survives pickling, else one of ours with its words."""
    with suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error) and isinstance(error, MillraceError):
            return error
    if isinstance(error, MemoryError):
        return OutOfMemory("the process of the reward has no memory left")
    kind = type(error) if isinstance(error, MillraceError) else RewardError
    return kind(f"{type(error).__name__}: {shortened(error)}")


def _leave_sockets(kept: int) -> None:
    """The connections of the parent are its own: who waits for their ends must not wait for this process."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(entry) not in (kept, 0, 1, 2) and os.readlink(f"/proc/self/fd/{entry}").startswith(
                "socket:"
            ):
                os.dup2(nowhere, int(entry), inheritable=False)
    os.close(nowhere)


def _send(channel: socket.socket, packed: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(packed)) + packed)


def _receive(channel: socket.socket) -> bytes:
    """Raises: EOFError: the other side is gone."""
    length = _LENGTH.unpack(_exactly(channel, _LENGTH.size))[0]
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), _CHUNK_BYTES))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _end(pid: int, channel: socket.socket) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits for an answer
    channel.close()


def _end_alike(pid: int) -> NoReturn:
    """End this process as the other one has ended."""
    code = 1
    with suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(ENDED_S)
    os._exit(code & 0xFF)
