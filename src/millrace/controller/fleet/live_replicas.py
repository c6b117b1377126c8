"""The replicas of a run while it goes on: who joins, who leaves, and one coroutine for each of them.

    scale(n)       a command: from now on the run wants n replicas
    noticed(name)  a replica reports that its host goes away
    a coroutine ends: its replica has left

After each event replicas join or leave until the fleet has the wanted number. A joining replica serves
nothing before its first pull has proved a digest. A leaving replica gets no new work, gives back its
trajectories with their tokens, and is killed. Its name is never used again. A host gets a relay with its
first replica. A host whose node is lost loses its replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from millrace.controller.context import RunContext
from millrace.controller.fault import is_workers, may_go_on_without
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.fleet.live_relays import LiveRelays
from millrace.controller.replica_session import ReplicaSession
from millrace.controller.state.orders import Mailbox
from millrace.controller.state.replicas import ReplicaRecord
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.trainer_session import TICK_S, TrainerSession
from millrace.core.errors import ConfigError, HostLost, MillraceError, WorkerError
from millrace.core.placement import THIS_HOST

NOTICE = "its process was told to end"
COMMAND = "fewer replicas were asked for"
LOST = "the node of its host is lost"


def to_leave(replicas: Iterable[ReplicaRecord], num: int) -> list[str]:
    """Which `num` of `replicas` leave: first those that serve nothing yet, then those with the fewest
    trajectories to move. Of equals the newest leaves first."""
    ranked = sorted(enumerate(replicas), key=lambda at: (at[1].version >= 0, len(at[1].leased), -at[0]))
    return [record.name for _, record in ranked[: max(0, num)]]


class LiveReplicas:
    """`wanted`: the number of replicas that the run shall have. All methods are synchronous, except `look`
    and the coroutines of the replicas."""

    def __init__(
        self,
        run: RunContext,
        fleet: Fleet,
        supervisor: Supervisor,
        slot_bytes: Callable[[], Awaitable[int]],
    ) -> None:
        self._run, self._fleet, self._supervisor = run, fleet, supervisor
        self.relays = LiveRelays(run, fleet, supervisor, slot_bytes=slot_bytes, gave_up=self._give_up)
        self._specs = {spec.name: spec for spec in fleet.replicas}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._first = frozenset(self._specs)
        self._limits: dict[str, asyncio.Timeout] = {}  # end the coroutine of a replica that is not up
        self._group: asyncio.TaskGroup | None = None
        self._next = 1 + max((_number(name) for name in self._specs), default=-1)
        self.wanted = len(fleet.replicas)
        self.trouble = ""  # why `wanted` is less than the number of the last command

    @property
    def num_serving(self) -> int:
        return sum(record.version >= 0 for record in self._run.state.replicas.staying)

    @property
    def settled(self) -> bool:
        """Whether the wanted number of replicas serve, and none is about to leave."""
        return self.num_serving == self.wanted == len(self._run.state.replicas)

    # ------------------------------------------------------------ commands

    def begin(self, group: asyncio.TaskGroup) -> None:
        """The coroutines of all replicas, as members of `group`."""
        self._group = group
        for spec in self._fleet.replicas:
            self._start(spec)

    def end(self) -> None:
        """The run is over: no replica joins any more, and all coroutines end."""
        self._group = None
        self.relays.end()
        for task in self._tasks.values():
            task.cancel()

    async def look(self) -> None:
        """Update the hosts for the next replicas. Raises: MillraceError."""
        await self._fleet.look()

    def scale(self, replicas: int) -> None:
        """The run shall have so many replicas. Raises: ConfigError: they have no room, and nothing
        changes."""
        if self._group is None:
            raise ConfigError("the run is about to end")
        specs = self._placed(replicas - len(self._run.state.replicas.staying))
        before, self.wanted, self.trouble = self.wanted, replicas, ""
        self._run.events.emit("scaled", replicas=replicas, before=before, reason="a command")
        for spec in specs:
            self._join(spec)
        staying = self._run.state.replicas.staying
        for name in to_leave(staying, len(staying) - replicas):
            self._leave(name, COMMAND)

    def noticed(self, name: str) -> None:
        """Replica `name` reports that its process was told to end. On the controller's own host another takes
        its place. On another host none does: that host goes away."""
        record = self._run.state.replicas[name]
        if record.leaving:
            return
        if record.host != THIS_HOST:
            self._want(self.wanted - 1, f"the host of {name} goes away")
        self._leave(name, NOTICE)

    # ------------------------------------------------------------ one replica

    def _start(self, spec: WorkerSpec) -> None:
        assert self._group is not None
        self._tasks[spec.name] = self._group.create_task(self._keep(spec), name=spec.name)

    async def _keep(self, spec: WorkerSpec) -> None:
        """Keep the replica of `spec` alive until it has left, or the run is over."""
        run, name = self._run, spec.name
        record = run.state.replicas[name]
        session = ReplicaSession(name, run, self.noticed)
        try:
            async with asyncio.timeout(0 if record.leaving else None) as self._limits[name]:
                await self._supervisor.keep(spec, session.run, is_leaving=lambda: bool(record.leaving))
        except (TimeoutError, MillraceError) as error:
            if not (record.leaving and isinstance(error, TimeoutError | WorkerError)):
                self._go_on_without(name, error)
        self._gone(name)
        if self._lacks:
            await self._try_to_look()
            self._fill()
        del self._tasks[name]

    def _go_on_without(self, name: str, error: Exception) -> None:
        """Replica `name` cannot start, or cannot go on. Raises: `error`, if the run needs that replica."""
        if isinstance(error.__cause__, HostLost):
            return self._mark_leaving(name, LOST)
        staying, fruitful = self._run.state.replicas.staying, self._run.waits.fruitful
        others = any(fruitful(record.name) for record in staying if record.name != name)
        if not may_go_on_without(error, first=name in self._first, worked=fruitful(name), others=others):
            raise error
        what = "could not go on" if fruitful(name) else "could not join"
        self._want(self.wanted - 1, f"{name} {what}: {error}")
        self._mark_leaving(name, f"it {what}")

    def _give_up(self, host: str, reason: str, lost: bool) -> None:
        """No relay can be on `host`, so its replicas leave. If its node is lost, others take their places. A
        host that joined and cannot be used is not tried again."""
        for record in self._run.state.replicas.staying:
            if record.host == host:
                if not lost:
                    self._want(self.wanted - 1, reason)
                self._leave(record.name, LOST if lost else "its host could not join")

    def _join(self, spec: WorkerSpec) -> None:
        run = self._run
        self._specs[spec.name] = spec
        self._next = max(self._next, 1 + _number(spec.name))
        run.mailboxes[spec.name] = Mailbox()
        self.relays.serve(spec.place.host)
        run.state.join(spec.name, spec.place.host)
        run.events.emit("joined", replica=spec.name, host=spec.place.host)
        run.waits.progress()
        self._start(spec)

    def _leave(self, name: str, reason: str) -> None:
        """The replica's session drains it. A replica that is not up has nothing to drain."""
        run = self._run
        self._mark_leaving(name, reason)
        run.mailboxes[name].close()
        if not run.state.replicas[name].alive and name in self._limits:
            self._limits[name].reschedule(asyncio.get_running_loop().time())
        run.pulse.fire()

    def _mark_leaving(self, name: str, reason: str) -> None:
        run, record = self._run, self._run.state.replicas[name]
        run.state.replicas.leave(name, reason)
        run.events.emit("leaving", replica=name, reason=reason, trajectories=list(record.leased))

    def _gone(self, name: str) -> None:
        run = self._run
        del self._specs[name], self._limits[name], run.mailboxes[name]
        run.state.replicas.gone(name)
        run.to_relays.fire()  # the relay of a host ends with the host's last replica
        run.events.emit("left", replica=name, replicas=len(run.state.replicas.staying))

    # ------------------------------------------------------------ the wanted number

    def _placed(self, num: int) -> list[WorkerSpec]:
        """Raises: ConfigError: there is no room for `num` more."""
        if num <= 0:
            return []
        names = [f"replica-{number}" for number in range(self._next, self._next + num)]
        return self._fleet.join(names, list(self._specs.values()))

    @property
    def _lacks(self) -> bool:
        """Whether another replica is to take the place of one that left."""
        lacks = len(self._run.state.replicas.staying) < self.wanted
        return lacks and self._group is not None and not self._run.stopping

    async def _try_to_look(self) -> None:
        try:
            await self.look()
        except MillraceError as error:
            self._run.events.emit("warned", source="hosts", reason=str(error))

    def _fill(self) -> None:
        """Another replica takes the place of one that left. If none can, the run goes on with fewer."""
        if not self._lacks:
            return
        staying = len(self._run.state.replicas.staying)
        try:
            specs = self._placed(self.wanted - staying)
        except ConfigError as error:
            self._want(staying, str(error))
            return
        for spec in specs:
            self._join(spec)

    def _want(self, replicas: int, reason: str) -> None:
        self._run.events.emit("scaled", replicas=replicas, before=self.wanted, reason=reason)
        self.wanted, self.trouble = replicas, reason


def _number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdecimal() else -1


class LiveTrainers:
    """`keep` returns when a trainer has done the last step."""

    def __init__(
        self, run: RunContext, fleet: Fleet, supervisor: Supervisor, session: TrainerSession
    ) -> None:
        self._run, self._fleet, self._supervisor, self._session = run, fleet, supervisor, session
        self._kept = set[str]()  # names of trainers whose supervision goes on

    async def keep(self) -> None:
        """Raises: the error of a trainer that another start would meet again; that of the last trainer."""
        if self._fleet.standby is None:
            await self._supervisor.keep(self._fleet.trainer, self._session.run)
            return
        async with asyncio.TaskGroup() as group:
            specs = self._fleet.trainer, self._fleet.standby
            keepers = [group.create_task(self._keep(spec), name=spec.name) for spec in specs]
            while not self._session.done:
                await self._run.pulse.wait(timeout_s=TICK_S)
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, spec: WorkerSpec) -> None:
        if spec is self._fleet.standby:
            await self._session.slot_bytes()  # two that start at once take longer
        session, turn = self._session, self._session.turn
        self._kept.add(spec.name)
        try:
            await self._supervisor.keep(spec, session.run, on_death=partial(session.died, spec.name))
        except Exception as error:
            self._kept.discard(spec.name)
            if not is_workers(error) or turn.holder == spec.name or not self._kept:
                raise
            warning = f"{spec.name} is given up, and the run goes on without a standby: {error}"
            self._run.events.emit("warned", source="trainer.standby", reason=warning)
