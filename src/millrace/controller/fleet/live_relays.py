"""The relays of a run while it goes on: one coroutine for each host with a rank of the trainer or a replica.

    a replica joins on a host without a relay   a relay starts there, as the last of the chain
    the last replica of a host has left         the relay of the host ends, and is forgotten

The root relays stay: the trainer writes into them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millrace.controller.context import RunContext
from millrace.controller.fault import may_go_on_without
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.fleet.relay_session import TICK_S, RelaySession
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.core.errors import HostLost, MillraceError

GaveUp = Callable[[str, str, bool], None]
"""Called with a host, a reason, and whether its node is lost, when no relay can be on that host. The replicas
of the host are to leave."""


class LiveRelays:
    """`slot_bytes`: the size of each of their slots."""

    def __init__(
        self,
        run: RunContext,
        fleet: Fleet,
        supervisor: Supervisor,
        *,
        slot_bytes: Callable[[], Awaitable[int]],
        gave_up: GaveUp,
    ) -> None:
        self._run, self._fleet, self._supervisor = run, fleet, supervisor
        self._slot_bytes, self._gave_up = slot_bytes, gave_up
        self._first = frozenset(spec.name for spec in fleet.relays)
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by host

    def begin(self, group: asyncio.TaskGroup) -> None:
        """The coroutines of all relays, as members of `group`."""
        self._group = group
        for spec in self._fleet.relays:
            self._start(spec)

    def end(self) -> None:
        """The run is over."""
        self._group = None
        for task in self._tasks.values():
            task.cancel()

    def serve(self, host: str) -> None:
        """Start the relay of `host`, on which a replica joins, unless it is there."""
        if host not in self._tasks:
            self._run.state.relays.join(host)
            self._start(self._fleet.relay(host))

    def _start(self, spec: WorkerSpec) -> None:
        assert self._group is not None
        self._tasks[spec.place.host] = self._group.create_task(self._keep(spec), name=spec.name)

    async def _keep(self, spec: WorkerSpec) -> None:
        """Keep the relay alive while it is needed. If it cannot be on its host, the host is given up, and
        this waits until the host has no replicas. Raises: the relay's error, if its host has to stay."""
        run, host = self._run, spec.place.host
        session = RelaySession(host, run, self._slot_bytes, lambda: self._needed(host))
        while self._needed(host):
            try:
                await self._supervisor.keep(spec, session.run, is_leaving=lambda: not self._needed(host))
            except MillraceError as error:
                lost = isinstance(error.__cause__, HostLost)
                if run.state.relays[host].root or not (lost or self._may_go_on_without(spec, error)):
                    raise
                if self._evaluates(host):
                    run.give_up_evaluations(run.evaluations.sections, str(error))
                self._gave_up(host, f"{spec.name} cannot be there: {error}", lost)
                await self._wait_until_empty(host)
        run.state.relays.gone(host)
        del self._tasks[host]

    def _needed(self, host: str) -> bool:
        replicas = self._run.state.replicas.values()
        return self._stays(host) or any(record.host == host for record in replicas)

    def _stays(self, host: str) -> bool:
        """Whether the relay stays without replicas: the trainer or the evaluator is on `host`."""
        return self._evaluates(host) or self._run.state.relays[host].root

    def _evaluates(self, host: str) -> bool:
        evaluator, state = self._fleet.evaluator, self._run.evaluations
        is_here = evaluator is not None and evaluator.place.host == host
        return is_here and state.given_up.keys() != state.sections.keys()

    def _may_go_on_without(self, spec: WorkerSpec, error: BaseException) -> bool:
        """Whether the run goes on without the relay and the replicas of its host."""
        fruitful, staying = self._run.waits.fruitful, self._run.state.replicas.staying
        others = any(fruitful(record.name) for record in staying if record.host != spec.place.host)
        first, worked = spec.name in self._first, fruitful(spec.name)
        return may_go_on_without(error, first=first, worked=worked, others=others)

    async def _wait_until_empty(self, host: str) -> None:
        while any(record.host == host and record.leaving for record in self._run.state.replicas.values()):
            await self._run.to_relays.wait(timeout_s=TICK_S)
