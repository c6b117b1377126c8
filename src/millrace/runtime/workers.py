"""The workers of any runtime: their epochs, how they begin and end, and one worker of several processes: its
ranks, behind one handle.

A call goes to every rank. Rank 0's answer counts, once all ranks have answered and agree. When one rank dies,
all ranks are killed: a rank that waits in a collective for a dead rank would wait for ever.

Each rank gets the variables RANK, WORLD_SIZE, LOCAL_RANK (the index of its device among its visible devices)
and MILLRACE_RENDEZVOUS: where ranks meet. That is a memory file of the controller without a name, so nothing
remains of the file, whoever dies. Ranks on several hosts also get MILLRACE_NETWORK, an address of their
network.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from millrace.core.errors import DeadlineExceeded, WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.core.progress import Vitals
from millrace.core.protocols import Done, Handle
from millrace.runtime.local.handle import END_TIMEOUT_S
from millrace.runtime.seam import PING, died, late, where

GRACE_S = 2.0
"""After one rank raised, other ranks may wait in a collective. They get this long to raise or answer too."""

AGREED = ("version", "digest")
"""Fields of an answer that must be the same on every rank."""

ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one host need no network, and nobody outside the host may connect to them."""


class _Outcome(NamedTuple):
    """A rank's answer, or its error."""

    answer: Any
    error: Exception | None = None


class Member(Handle, Protocol):
    """The handle of one rank."""

    @property
    def pid(self) -> int | None: ...

    @property
    def suspended(self) -> bool: ...

    def dump_stacks(self) -> None: ...

    async def end(self) -> None: ...


M = TypeVar("M", bound=Member)


class GangHandle(Generic[M]):
    """One incarnation of a worker with several ranks; see `core.protocols.Handle`. Members are by rank.

    `dead` resolves when no rank lives, with the cause of the first death. From the first death on, commands
    are refused and calls in flight raise.
    """

    def __init__(self, name: str, epoch: int, members: Sequence[M]) -> None:
        self.name, self.epoch, self.members = name, epoch, tuple(members)
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cause = ""
        self._store = os.memfd_create("rendezvous")
        for rank, member in enumerate(self.members):
            member.dead.add_done_callback(partial(self._member_died, rank))

    @property
    def pid(self) -> int | None:
        """Rank 0's."""
        return self.members[0].pid

    @property
    def pids(self) -> list[int | None]:
        """Of every rank."""
        return [member.pid for member in self.members]

    def __getattr__(self, name: str) -> Any:
        """Of all ranks alike: on a cluster, the `address` of their node."""
        if name == "address":
            return getattr(self.members[0], name)
        raise AttributeError(name)

    @property
    def suspended(self) -> bool:
        """Whether somebody has stopped one of its processes."""
        return any(member.suspended for member in self.members)

    # ------------------------------------------------------------ commands

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Raises: as `Handle.call`, the lowest rank's error. Ranks that wait on GRACE_S after one raised are
        killed. WorkerError: the ranks disagree; all are killed."""
        if self._cause:
            raise died(self.name, self.epoch, method, self._cause)
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(_outcome(member.call(method, *args, timeout_s=timeout_s)), name=member.name)
                for member in self.members
            ]
            error = await self._all_answered(method, calls)
        if error is not None:
            raise error
        return self._agreed(method, [task.result().answer for task in calls])

    async def _all_answered(self, method: str, calls: list[asyncio.Task[_Outcome]]) -> Exception | None:
        """Wait until every rank has answered, raised or died. Returns the error that the call raises, or
        None."""
        errors: list[Exception] = []
        waiting = set(calls)
        while waiting:
            grace_s = GRACE_S if errors and not self._cause else None
            done, waiting = await asyncio.wait(waiting, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._end(f"killed: {len(waiting)} ranks did not answer {method} after one had raised")
                return errors[0]
            outcomes = [task.result() for task in calls if task.done()]
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if self._cause:  # the cause explains the errors of the other ranks
            return died(self.name, self.epoch, method, self._cause)
        return errors[0] if errors else None

    def call_then(self, method: str, *args: Any, done: Done) -> None:
        """Raises: WorkerError. All ranks would have to agree on an answer that nobody waits for."""
        raise WorkerError(f"{where(self.name, self.epoch, method)}: several ranks take no call_then")

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Raises: WorkerError. No rule says which rank's items would count."""
        raise WorkerError(f"{where(self.name, self.epoch, method)}: several ranks have no streams")
        yield

    def dump_stacks(self) -> None:
        for member in self.members:
            member.dump_stacks()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def _agreed(self, method: str, answers: Sequence[Any]) -> Any:
        if method == PING:
            return _total(answers)
        for field in AGREED:
            values = [getattr(answer, field, None) for answer in answers]
            if any(value != values[0] for value in values):
                cause = f"its ranks disagree on the {field} of {method}'s answer: {values}, by rank"
                self._end(cause)
                raise WorkerError(f"{where(self.name, self.epoch, method)}: {cause}. All of them are killed")
        return answers[0]

    # ------------------------------------------------------------ the runtime's part

    async def start(self, place: Place, begin: Callable[[M, Place], Awaitable[None]]) -> None:
        """`begin` every rank, all at once, at its share of `place`.

        Raises: the first error; deaths come last, since another rank's error may explain them.
        """
        try:
            async with asyncio.TaskGroup() as group:
                begun = [
                    group.create_task(_run(begin(member, self._place_of(place, rank))), name=member.name)
                    for rank, member in enumerate(self.members)
                ]
                # A group that is closing already would not undo its cancellation of this task (Python 3.11).
                await asyncio.wait(begun)
        except BaseExceptionGroup as failures:
            raise min(failures.exceptions, key=lambda error: isinstance(error, WorkerDied)) from None

    async def end(self) -> None:
        """Kill all ranks and wait, for END_TIMEOUT_S at most, until they are gone."""
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(member.end(), name=member.name)
        await asyncio.wait([self.dead], timeout=END_TIMEOUT_S)

    def _place_of(self, place: Place, rank: int) -> Place:
        """A rank is on its own host. It sees only its own devices, if there is a device for each rank."""
        devices, each = place.devices, len(place.devices or ()) // place.ranks
        if devices is not None and each:
            devices = devices[rank * each : (rank + 1) * each]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_RANK": "0" if each else str(rank),
            "MILLRACE_RENDEZVOUS": f"file:///proc/{os.getpid()}/fd/{self._store}",
        }
        network = {"MILLRACE_NETWORK": place.meet} if place.hosts else ONE_HOST
        return replace(
            place,
            host=place.hosts[rank * len(place.hosts) // place.ranks] if place.hosts else place.host,
            devices=devices,
            ranks=1,
            hosts=(),
            environ={**network, **place.environ, **variables},
        )

    def _end(self, cause: str) -> None:
        self._cause = self._cause or cause
        self.kill()

    def _member_died(self, rank: int, dead: asyncio.Future[str]) -> None:
        self._end(f"rank {rank}: {dead.result()}")
        if all(member.dead.done() for member in self.members) and not self.dead.done():
            os.close(self._store)
            self.dead.set_result(self._cause)


async def _outcome(call: Awaitable[Any]) -> _Outcome:
    try:
        return _Outcome(await call)
    except Exception as error:
        return _Outcome(None, error)


async def _run(work: Awaitable[None]) -> None:
    await work


def _total(vitals: Sequence[Vitals]) -> Vitals:
    """The vitals of all ranks, added up as those of one process."""
    return Vitals(
        cpu_s=sum(one.cpu_s for one in vitals),
        resident_bytes=sum(one.resident_bytes for one in vitals),
        disk=any(one.disk for one in vitals),
        calls=[call for one in vitals for call in one.calls],
        receiving=any(one.receiving for one in vitals),
        queued_s=sum(one.queued_s for one in vitals),
    )


# ---------------------------------------------------------------- workers


CLOSE_TIMEOUT_S = 10.0


class Workers(Generic[M]):
    """Handles of workers: one process each, or a gang. Epochs go on from the logs in `log_dir`."""

    def __init__(self, log_dir: Path | None) -> None:
        self._epochs = newest_epochs(log_dir)  # of the newest incarnation, by `file_name`
        self._handles: set[M | GangHandle] = set()
        self.closed = False

    def check(self, name: str, ranks: int) -> None:
        """Raises: WorkerError: no worker can begin, or none with this number of ranks."""
        if self.closed:
            raise WorkerError(f"cannot spawn {name}: the runtime is closed")
        if ranks < 1:
            raise WorkerError(f"cannot spawn {name} with {ranks} ranks: a worker is at least one process")

    def make(self, name: str, ranks: int, member: Callable[[str, int], M]) -> M | GangHandle:
        """The handle of the worker's next incarnation. `member` makes the handle of one process."""
        epoch = self._epochs[file_name(name)] = self._epochs.get(file_name(name), 0) + 1
        handle: M | GangHandle
        if ranks == 1:
            handle = member(name, epoch)
        else:
            handle = GangHandle(name, epoch, [member(f"{name}.{rank}", epoch) for rank in range(ranks)])
        self._handles.add(handle)
        handle.dead.add_done_callback(lambda _: self._handles.discard(handle))
        return handle

    async def start(
        self,
        handle: M | GangHandle,
        place: Place,
        begin: Callable[[M, Place], Awaitable[None]],
        *,
        target: str,
        timeout_s: float,
    ) -> None:
        """Begin each process of the worker. If one fails, all end. Raises: DeadlineExceeded, and what `begin`
        raises."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if isinstance(handle, GangHandle):
                    await handle.start(place, begin)
                else:
                    await begin(handle, place)
        except BaseException as error:
            await handle.end()
            if isinstance(error, TimeoutError) and limit.expired():
                raise late(handle.name, handle.epoch, target, timeout_s) from None
            raise

    def dump_stacks(self) -> None:
        """Have every worker write its stacks into its log."""
        for handle in self._handles:
            handle.dump_stacks()

    def each(self) -> list[M]:
        """Every process."""
        gangs = [handle.members if isinstance(handle, GangHandle) else [handle] for handle in self._handles]
        return [member for members in gangs for member in members]

    def kill(self) -> None:
        """Kill all workers; no other worker can begin."""
        self.closed = True
        for handle in list(self._handles):
            handle.kill()

    async def gone(self) -> None:
        """Wait until no worker lives. Raises: DeadlineExceeded, naming those that live on."""
        if handles := list(self._handles):
            await asyncio.wait([handle.dead for handle in handles], timeout=CLOSE_TIMEOUT_S)
        if alive := [f"{handle.name} (epoch {handle.epoch})" for handle in handles if not handle.dead.done()]:
            raise DeadlineExceeded(f"{', '.join(alive)}: alive {CLOSE_TIMEOUT_S:g} s after they were killed")


def file_name(name: str) -> str:
    return name.replace("/", "_")


def newest_epochs(log_dir: Path | None) -> dict[str, int]:
    """The newest epoch of every worker that has a log there, whatever its number of ranks."""
    epochs: dict[str, int] = {}
    for path in log_dir.glob("*.*.log") if log_dir is not None else ():
        name, _, epoch = path.name.removesuffix(".log").rpartition(".")
        worker, _, rank = name.rpartition(".")
        for stem in (name, worker) if rank.isdecimal() else (name,):
            if epoch.isdecimal():
                epochs[stem] = max(epochs.get(stem, 0), int(epoch))
    return epochs
