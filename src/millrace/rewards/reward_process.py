"""The process in whose main thread plain reward functions run.

A thread would not do: alarms and handlers of signals are refused there, and so is `asyncio.get_event_loop`;
libraries with time limits of their own fail, and a reward that catches the error says 0 to everything.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from millrace.core.errors import DeadlineExceeded, MillraceError, OutOfMemory, RewardError
from millrace.core.types import Failed, Score
from millrace.devices.syscalls import prctl
from millrace.rewards.limits import limit_process_memory
from millrace.rewards.rewards import Reward
from millrace.rewards.scores import shortened
from millrace.tasks.rows import Row

PR_SET_PDEATHSIG = 1
TOGETHER_BYTES = 1 << 20
"""Calls that are sent together have no more, or are one."""
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
        self._is_busy = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def make(self, config: Any) -> MadeReward:
        """Make the reward of a configuration there. Raises: what making it raises."""
        made: MadeReward = self._ask(("make", config))
        return made

    def limit_memory(self, extra_mb: int) -> None:
        """Let the memory of the process grow by so much from now on."""
        self._ask(("limit", extra_mb))

    async def scores(
        self, number: int, calls: Iterable[Arguments], timeout_s: float, too_long: str
    ) -> AsyncGenerator[Score, None]:
        """The scores of calls, in order. Each call begins when the one before it has ended. Closing the
        iterator leaves out calls that have not begun.

        Raises: OutOfMemory; DeadlineExceeded: a call took longer than `timeout_s`. The process was killed.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        if self._loop is not loop:
            self._loop, self._turn = loop, asyncio.Lock()
        try:
            async with asyncio.timeout_at(ends_s):
                await self._turn.acquire()
            try:
                for together in _together(calls):
                    while self._is_busy:  # with a call whose score nobody waits for any more
                        await self._answer(ends_s)
                    self._send(("score", number, ends_s - loop.time(), together))
                    self._is_busy = True
                    while (answer := await self._answer(ends_s)) is not None:
                        yield answer
                        ends_s = loop.time() + timeout_s
            finally:
                if self._is_busy and self._end.alive:
                    self._send(("leave out",))
                self._turn.release()
        except TimeoutError:
            self._end()
            raise DeadlineExceeded(too_long) from None

    async def _answer(self, ends_s: float) -> Any:
        """The next score of the calls that were sent; None: there is none left."""
        if not _has_message(self._channel):
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._channel, came.set)
            try:
                async with asyncio.timeout_at(ends_s):
                    await came.wait()
            finally:
                loop.remove_reader(self._channel)
        return self._receive()

    def _ask(self, message: tuple[Any, ...]) -> Any:
        self._send(message)
        return self._receive()

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send_bytes(pickle.dumps(message))
        except OSError:
            self._ended()

    def _receive(self) -> Any:
        try:
            answer = pickle.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            self._ended()
        self._is_busy = isinstance(answer, Score)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _ended(self) -> NoReturn:
        if not self._end.alive:
            raise DeadlineExceeded("the process of the reward was ended") from None
        _end_alike(self._pid)


def _fork(*functions: Any) -> tuple[int, Connection]:
    ours, theirs = Pipe()
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


def _serve(channel: Connection, make: Callable[[Any], Reward], score: ScoreFunction) -> None:
    """Answer until the parent is gone. This is the main thread of the new process."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # as its worker, it is ended by SIGKILL
    _leave_sockets(channel.fileno())
    rewards, loop = list[Reward](), asyncio.new_event_loop()
    while True:
        try:
            message = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return
        answer: Any = None
        loop = _set(loop)
        try:
            match message:
                case ("make", config):
                    rewards.append(reward := make(config))
                    answer = MadeReward(len(rewards) - 1, reward.name, reward.is_async)
                case ("limit", extra_mb):
                    limit_process_memory(extra_mb)
                case ("score", number, left_s, calls):
                    for packed in calls:
                        loop, one = _set(loop), _loaded(packed)
                        if not isinstance(one, Failed):
                            one = score(rewards[number], one, left_s, loop)
                        channel.send_bytes(pickle.dumps(one))
                        if _has_message(channel):
                            break
                case ("leave out",):
                    continue
        except BaseException as error:  # not even SystemExit may leave
            answer = _crossing(error)
        channel.send_bytes(pickle.dumps(answer))


def _loaded(packed: bytes) -> Any:
    """The arguments of a call, or why there are none, as Failed."""
    try:
        return pickle.loads(packed)
    except Exception as error:  # any object of a row may refuse
        return Failed(f"the process of the reward cannot read the row: {shortened(error)}")


def _set(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """This loop, or a new one, is the one of the thread. A function may have set another, or none."""
    loop = asyncio.new_event_loop() if loop.is_closed() else loop
    asyncio.set_event_loop(loop)
    return loop


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


def _together(calls: Iterable[Arguments]) -> Iterator[list[bytes]]:
    """Pickled calls that go to the process in one message. A row that cannot be sent is a Failed instead."""
    together, num_bytes = list[bytes](), 0
    for call in calls:
        try:
            packed = pickle.dumps(call)
        except Exception as error:  # any object of a row may refuse
            reason = f"the row cannot be sent to the process of the reward: {shortened(error)}"
            packed = pickle.dumps(Failed(reason))
        if together and num_bytes + len(packed) > TOGETHER_BYTES:
            yield together
            together, num_bytes = [], 0
        together.append(packed)
        num_bytes += len(packed)
    yield together


def _has_message(channel: Connection) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


def _end(pid: int, channel: Connection) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
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
