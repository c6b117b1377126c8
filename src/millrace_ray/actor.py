"""The worker's side on Ray: an actor that holds one object and runs its methods, and the messages between it
and the controller: pickled values, and streams that the controller pulls. This module does not import
Ray.

Ray calls the methods of `Hosted` on two threads, each with an event loop. Commands and the object's own tasks
run on the first loop. `ping`, `lease` and `look_at_log` run on the second loop. So the worker renews its
lease and bounds its log, however busy the object is. The first loop makes the answer to a ping. A worker
whose first loop is stuck answers no ping.

Values cross as pickles of our own, as on the local runtime: arrays stay writable. A value that cannot be
pickled is the error of its own call.

The controller pulls a stream. One `pull` of the controller always waits; it brings the items since the last
`pull`. An answer says how many items its worker had yielded before the answer. The controller hands the
answer out after these items.

Threat model: whoever may submit to the cluster may run anything on it (docs/cluster.md).

`Items` has the items of a stream that the worker has yielded and the controller has not fetched. `Inbox` has
the fetched items that the consumer has not taken. The window bounds both together: a generator is at most
`STREAM_WINDOW` items ahead of its consumer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import StaleEpochError
from millrace.runtime.logs import LOG_LOOK_S, bound_log, open_log
from millrace.runtime.process import CUT_OFF, adopt_orphans, set_title
from millrace.runtime.seam import (
    PING,
    STREAM_WINDOW,
    ExecutedCalls,
    begin_stream,
    crossing,
    load_class,
    where,
)
from millrace.runtime.vitals import VitalSigns
from millrace.runtime.workers import file_name

LOOK_S = 0.5
"""Between looks at the lease. A process that was suspended first reads the messages that waited."""


class ActorSetup(msgspec.Struct, frozen=True):
    """How an actor's process is set up before it makes its object.

    `variables` are set in its environment. `log_dir` takes its output, bounded as `logs` says (None: Ray
    takes the output). `path` is added to its import path. `directory` becomes its working directory, where
    this directory exists. A worker that gets no message for `silence_s_max` ends itself.
    """

    variables: dict[str, str]
    log_dir: str | None
    path: tuple[str, ...]
    directory: str
    silence_s_max: float | None


class Hosted:
    """One incarnation of one worker."""

    def __init__(self, name: str, epoch: int) -> None:
        self._name, self._epoch = name, epoch
        self._object: Any = None
        self._silence_s_max: float | None = None
        self._log: Path | None = None
        self._message_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._alive = asyncio.Event()  # `live` has begun
        self._streams: dict[int, Items] = {}
        self._vitals, self._calls = VitalSigns(), ExecutedCalls()
        self._store = -1

    # ------------------------------------------------------------ on the first loop

    async def live(self) -> None:
        """Own the tasks of this incarnation. Never returns: the call fails at the death, and the controller
        sees that."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._alive.set()
            await asyncio.get_running_loop().create_future()

    async def begin(self, setup: ActorSetup) -> int:
        """Set this process up as `setup` says. Returns the process id."""
        self._loop = asyncio.get_running_loop()
        self._silence_s_max = setup.silence_s_max
        if setup.log_dir is not None:
            self._log = _write_into(Path(setup.log_dir), file_name(self._name), self._epoch)
        os.environ.update(setup.variables)
        sys.path += [entry for entry in setup.path if entry not in sys.path]
        with suppress(OSError):
            os.chdir(setup.directory)
        os.umask(0o077)  # only the owner may read the files of a run
        set_title(self._name)
        adopt_orphans()
        await self._alive.wait()  # Ray may begin `live` later
        return os.getpid()

    async def rendezvous(self, address: str) -> str:
        """Where the ranks of a gang meet: a memory file, which ends with this process. Ranks on several nodes
        meet at a port of `address`, the address of this node."""
        if not address:
            if self._store < 0:
                self._store = os.memfd_create("rendezvous")
            return f"file:///proc/{os.getpid()}/fd/{self._store}"
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        os.environ["MILLRACE_LISTENS"] = str(listener.detach())
        return f"tcp://{address}:{port}"

    async def construct(self, epoch: int, target: str, variables: dict[str, str], kwargs: bytes) -> Answer:
        """Make the object in a thread: loading may take minutes, and the loop answers pings meanwhile."""

        async def make() -> None:
            os.environ.update(variables)
            made = await asyncio.to_thread(lambda: load_class(target)(**unpacked(kwargs)))
            self._message_s = _now()
            self._object = made

        return await self._answer(epoch, target, make)

    async def call(self, epoch: int, method: str, args: bytes) -> Answer:
        async def work() -> Any:
            return await self._calls.run(self._object, method, unpacked(args))

        return await self._answer(epoch, method, work)

    async def open(self, epoch: int, stream: int, method: str, args: bytes) -> Answer:
        """Begin a stream. Its number is new."""

        async def work() -> None:
            self._open(stream, method, unpacked(args))

        return await self._answer(epoch, method, work)

    async def pull(self, stream: int) -> tuple[list[Answer], bool]:
        """The items of `stream` since the last pull, at least one; and whether the stream is complete."""
        items = self._streams.get(stream)
        answers, complete = await items.take() if items is not None else ([], True)
        if complete:
            self._streams.pop(stream, None)
        return answers, complete

    async def grant(self, stream: int, num_items: int) -> None:
        """The consumer has taken `num_items` more."""
        if items := self._streams.get(stream):
            items.grant(num_items)

    async def close(self, stream: int) -> None:
        """The consumer wants no more."""
        if items := self._streams.get(stream):
            items.close()

    async def dump_stacks(self) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    # ------------------------------------------------------------ on the second loop

    async def lease(self) -> None:
        """Never returns: end this process when its controller has been silent for too long."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._object is None or self._silence_s_max is None:
                continue
            message_s = self._message_s
            await asyncio.sleep(message_s + self._silence_s_max - _now())
            await asyncio.sleep(LOOK_S)
            if self._message_s == message_s:
                _end("stopped itself: its controller fell silent")

    async def look_at_log(self) -> None:
        """Never returns: cut the log of this process whenever the log has become too long."""
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            if self._log is not None:
                with suppress(OSError):  # the disk is full: a write that matters more reports the error
                    await asyncio.to_thread(bound_log, self._log)

    async def ping(self, epoch: int) -> Answer:
        """Renew the lease here, and take the vitals on the first loop."""

        async def work() -> Any:
            assert self._loop is not None, "a ping before `begin`"
            vitals: concurrent.futures.Future[Any] = concurrent.futures.Future()
            self._loop.call_soon_threadsafe(lambda: vitals.set_result(self._take_vitals()))
            return await asyncio.wrap_future(vitals)

        answer = await self._answer(epoch, PING, work)
        return msgspec.structs.replace(answer, before={})  # a heartbeat waits for no item of a stream

    def _take_vitals(self) -> Any:
        return self._vitals.take(self._calls.vitals(), receiving=False)

    # ------------------------------------------------------------ parts

    async def _answer(self, epoch: int, method: str, work: Callable[[], Awaitable[Any]]) -> Answer:
        """Run one command. Its caller gets an answer at every possible end."""
        try:
            if epoch != self._epoch:
                worker = f"{self._name} (epoch {self._epoch})"
                raise StaleEpochError(f"{worker} got a command for epoch {epoch}; use the newest handle")
            self._message_s = _now()
            return Answer(True, packed(await work()), self._before())
        except (Exception, asyncio.CancelledError) as error:
            return self._error(method, error)

    def _error(self, method: str, error: BaseException) -> Answer:
        crossed = crossing(error, where(self._name, self._epoch, method))
        return Answer(False, packed(crossed), self._before())

    def _before(self) -> dict[int, int]:
        return {stream: items.num_yielded for stream, items in tuple(self._streams.items())}

    def _open(self, stream: int, method: str, args: tuple[Any, ...]) -> None:
        source = begin_stream(self._object, method, args)
        items = self._streams[stream] = Items()

        async def work() -> None:
            try:
                async with aclosing(source):
                    await items.room()
                    async for item in source:
                        items.put(Answer(True, packed(item)))
                        await items.room()
                items.end(None)
            except (Exception, asyncio.CancelledError) as error:
                items.end(self._error(method, error))

        assert self._tasks is not None, "a stream before `live`"
        items.task = self._tasks.create_task(work())


def _now() -> float:
    """This time is the same on every loop of the process."""
    return asyncio.get_running_loop().time()


def _write_into(log_dir: Path, stem: str, epoch: int) -> Path:
    """Write the output of this process into its log from now on. Returns the path of the log."""
    path, fd = open_log(log_dir, stem, epoch)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    faulthandler.enable()
    return path


def _end(reason: str) -> None:
    """End this process, and the processes that it has started."""
    with suppress(OSError):
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(CUT_OFF)


# ---------------------------------------------------------------- messages


def packed(value: Any) -> bytes:
    """Raises what pickling raises."""
    return pickle.dumps(value, protocol=5)


def unpacked(payload: bytes) -> Any:
    """Raises what unpickling raises. Both ends belong to one run; docs/cluster.md says who else may write."""
    return pickle.loads(payload)


class Answer(msgspec.Struct, frozen=True):
    """The pickled result or error of a command, and how many items each open stream had yielded before."""

    ok: bool
    payload: bytes
    before: dict[int, int] = {}


class Items:
    """The worker's side of one stream. `task` runs the generator.

    Waits for: room (credits of the consumer). Unblocks: `take`, with each item and with the end.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.num_yielded = 0
        self._credit = asyncio.Semaphore(STREAM_WINDOW)
        self._news = asyncio.Event()
        self._yielded: list[Answer] = []
        self._complete = False

    async def room(self) -> None:
        await self._credit.acquire()

    def put(self, item: Answer) -> None:
        self.num_yielded += 1
        self._yielded.append(item)
        self._news.set()

    def end(self, error: Answer | None) -> None:
        self._complete = True
        self._yielded += [error] if error is not None else []
        self._news.set()

    async def take(self) -> tuple[list[Answer], bool]:
        """All items that nobody has fetched, at least one; and whether the stream is complete."""
        await self._news.wait()
        self._news.clear()
        taken, self._yielded = self._yielded, []
        return taken, self._complete

    def grant(self, num_items: int) -> None:
        for _ in range(num_items):
            self._credit.release()

    def close(self) -> None:
        """End the generator, wherever it waits."""
        if self.task is not None:
            self.task.cancel()


class Inbox:
    """The controller's side of one stream: (item, error) in order, then None."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Any, BaseException | None] | None] = asyncio.Queue()
        self._num_arrived = 0
        self._later: deque[tuple[int, Callable[[], None]]] = deque()

    def put(self, item: Any, error: BaseException | None = None) -> None:
        self._queue.put_nowait((item, error))
        self._num_arrived += 1
        while self._later and self._later[0][0] <= self._num_arrived:
            self._later.popleft()[1]()

    def end(self) -> None:
        self._queue.put_nowait(None)
        while self._later:
            self._later.popleft()[1]()

    async def get(self) -> tuple[Any, BaseException | None] | None:
        return await self._queue.get()

    def after(self, num_items: int, then: Callable[[], None]) -> None:
        """Call `then` once `num_items` have arrived, or once no more items can arrive."""
        if num_items <= self._num_arrived:
            then()
        else:
            self._later.append((num_items, then))
