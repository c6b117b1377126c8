"""The worker's side on Ray: an actor that holds one object and runs its methods. It does not import Ray.

Ray calls the methods of `Hosted` on two threads, each with an event loop. Commands run on the first one,
beside whatever the object does there. `ping`, `lease` and `look_at_log` run on the second one. So the lease
is renewed, and the log bounded, however busy the object is. The answer to a ping is made on the first loop:
one that does not turn answers no ping.

Values cross as pickles of our own. They are what they are on the local runtime: arrays stay writable, and
what cannot be pickled is the error of its own call.

A stream is pulled. The controller always has one `pull` waiting, which brings what has been yielded since the
last one. An answer says how many items its worker had yielded before it, so that the controller can hand it
out after those.

Threat model: whoever may submit to the cluster may run anything on it (docs/cluster.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import StaleEpochError
from millrace.runtime.logs import LOG_LOOK_S, bound_log, open_log
from millrace.runtime.process import CUT_OFF, adopt_orphans, set_title
from millrace.runtime.ray.messages import Answer, Items, packed, unpacked
from millrace.runtime.seam import PING, begin_call, begin_stream, crossing, load_class, where
from millrace.runtime.vitals import VitalSigns
from millrace.runtime.workers import file_name

LOOK_S = 0.5
"""Between looks at the lease. A process that could not run first sees the messages that waited for it."""


class ActorSetup(msgspec.Struct, frozen=True):
    """What an actor's process becomes before it makes its object.

    `variables` are set in its environment. `log_dir` takes its output, bounded as `logs` says (None: it stays
    with Ray). `path` is added to what it imports from. `directory` is where it works, if it exists there. A
    worker that hears nothing for `silence_s_max` ends itself.
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
        self._heard_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._streams: dict[int, Items] = {}
        self._calls: list[str] = []
        self._vitals = VitalSigns()
        self._store = -1

    # ------------------------------------------------------------ on the first loop

    async def live(self) -> None:
        """Own what this incarnation does. It never returns: the controller sees it fail at the death."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.get_running_loop().create_future()

    async def begin(self, setup: ActorSetup) -> int:
        """Become `setup`. Returns the process id."""
        self._loop = asyncio.get_running_loop()
        self._silence_s_max = setup.silence_s_max
        if setup.log_dir is not None:
            self._log = _write_into(Path(setup.log_dir), file_name(self._name), self._epoch)
        os.environ.update(setup.variables)
        sys.path += [entry for entry in setup.path if entry not in sys.path]
        with suppress(OSError):
            os.chdir(setup.directory)
        os.umask(0o077)  # whatever a run writes is its owner's alone
        set_title(self._name)
        adopt_orphans()
        return os.getpid()

    async def rendezvous(self, address: str) -> str:
        """Where the ranks of a gang meet: a memory file of this process, which goes with it. Ranks on several
        nodes meet at a port of `address`, which is this node's."""
        if not address:
            if self._store < 0:
                self._store = os.memfd_create("rendezvous")
            return f"file:///proc/{os.getpid()}/fd/{self._store}"
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        os.environ["MILLRACE_LISTENS"] = str(listener.detach())
        return f"tcp://{address}:{port}"

    async def construct(self, epoch: int, target: str, variables: dict[str, str], kwargs: bytes) -> Answer:
        """Make the object, in a thread: loading may take minutes, and pings are answered meanwhile."""

        async def make() -> None:
            os.environ.update(variables)
            made = await asyncio.to_thread(lambda: load_class(target)(**unpacked(kwargs)))
            self._heard_s = _now()
            self._object = made

        return await self._answer(epoch, target, make)

    async def call(self, epoch: int, method: str, args: bytes) -> Answer:
        async def work() -> Any:
            begun = begin_call(self._object, method, unpacked(args))
            self._calls.append(method)
            try:
                return await begun
            finally:
                self._calls.remove(method)

        return await self._answer(epoch, method, work)

    async def open(self, epoch: int, stream: int, method: str, args: bytes) -> Answer:
        """Begin a stream. Its number is new."""

        async def work() -> None:
            self._open(stream, method, unpacked(args))

        return await self._answer(epoch, method, work)

    async def pull(self, stream: int) -> tuple[list[Answer], bool]:
        """What `stream` has yielded since the last pull, once there is something; whether that was all."""
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
            heard_s = self._heard_s
            await asyncio.sleep(heard_s + self._silence_s_max - _now())
            await asyncio.sleep(LOOK_S)
            if self._heard_s == heard_s:
                _end("stopped itself: its controller fell silent")

    async def look_at_log(self) -> None:
        """Never returns: cut the log of this process whenever it has become too long."""
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            if self._log is not None:
                with suppress(OSError):  # a full disk, of which what matters more will tell
                    await asyncio.to_thread(bound_log, self._log)

    async def ping(self, epoch: int) -> Answer:
        """The lease is renewed here, and the vitals are taken on the first loop."""

        async def work() -> Any:
            assert self._loop is not None, "a ping before `begin`"
            vitals: concurrent.futures.Future[Any] = concurrent.futures.Future()
            self._loop.call_soon_threadsafe(lambda: vitals.set_result(self._take_vitals()))
            return await asyncio.wrap_future(vitals)

        return await self._answer(epoch, PING, work)

    def _take_vitals(self) -> Any:
        return self._vitals.take(self._calls, receiving=False)

    # ------------------------------------------------------------ parts

    async def _answer(self, epoch: int, method: str, work: Callable[[], Awaitable[Any]]) -> Answer:
        """Run one command. Its caller hears of every possible end."""
        try:
            if epoch != self._epoch:
                told = f"{self._name} (epoch {self._epoch}) got a command for epoch {epoch}"
                raise StaleEpochError(f"{told}; use the newest handle")
            self._heard_s = _now()
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
    """The same on every loop of the process."""
    return asyncio.get_running_loop().time()


def _write_into(log_dir: Path, stem: str, epoch: int) -> Path:
    """Its log, which is its output from here on."""
    path, fd = open_log(log_dir, stem, epoch)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    faulthandler.enable()
    return path


def _end(why: str) -> None:
    """End this process, and what it has started."""
    with suppress(OSError):
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(CUT_OFF)
