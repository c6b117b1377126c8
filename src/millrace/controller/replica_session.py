"""One replica's session: reports in, orders out.

Orders are carried out one after another. Work that a dead replica never got is leased to another replica.
This is safe because submitting is idempotent.

A replica that leaves gives back its trajectories with their tokens so far, and its session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import asdict

from millrace.controller.context import RunContext
from millrace.controller.group_ends import poisoned
from millrace.controller.state.orders import Abort, Move, Pull, Rest, Submit
from millrace.core.errors import DeadlineExceeded, TornVersionError, UnknownVersionError, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import Report, Served, Trajectory

MISSED_S = 0.5  # before the next decision, after the same version was missing twice
LOOKS = 5  # for a report, within the deadline of a report


class ReplicaSession:
    """`run` is one incarnation's session. The mailbox is emptied when the session ends. The session returns
    when the replica has left. `noticed` is called when the replica itself reports that it has to leave."""

    def __init__(self, name: str, run: RunContext, noticed: Callable[[str], None]) -> None:
        self.name, self._run, self._noticed = name, run, noticed
        self._mailbox = run.mailboxes[name]
        self._num_reports = 0
        self._missed = -1  # the version that was missing at the last pull

    async def run(self, handle: Handle) -> None:
        run = self._run
        run.state.replicas.up(self.name, handle.epoch)
        run.device.up(self.name)
        run.pulse.fire()
        try:
            async with asyncio.TaskGroup() as group:
                listeners = [
                    group.create_task(self._reports(handle), name=f"{self.name}.reports"),
                    group.create_task(self._listen(), name=f"{self.name}.listen"),
                    group.create_task(self._probe(handle), name=f"{self.name}.probe"),
                ]
                await self._carry_out(handle)
                await self._release(handle)
                for listener in listeners:
                    listener.cancel()
                await asyncio.wait(listeners)  # see `Supervisor`: a listener must fail inside the group
        finally:
            self._down()

    def _down(self) -> None:
        run = self._run
        for order in self._mailbox.orders:
            if isinstance(order, Move):
                run.state.replicas.end_move(self.name, order.shares)
        self._mailbox.orders.clear()
        for trajectory in run.state.replica_down(self.name):
            if trajectory.live:
                poisoned(run, trajectory, self.name)
        run.pulse.fire()

    # ------------------------------------------------------------ in

    async def _reports(self, handle: Handle) -> None:
        """Consumes the replica's stream of reports. Ends, with an error, when the replica ends."""
        async for report in handle.stream("reports"):
            self._num_reports += 1
            self._take_in(report)
        raise WorkerDied(f"{self.name}: its report stream ended")

    async def _listen(self) -> None:
        """A replica promises two reports within the timeout. Without any it is killed, even if it answers
        calls.

        Looks are counted, not seconds: a controller that was stopped has missed one look.
        """
        timeout_s, silent = self._run.config.supervision.heartbeat_timeout_s, 0
        while silent < LOOKS:
            before = self._num_reports
            await asyncio.sleep(timeout_s / LOOKS)
            silent = silent + 1 if self._num_reports == before else 0
        raise DeadlineExceeded(
            f"{self.name}: no report for {timeout_s:g} s (`supervision.heartbeat_timeout_s`), and two "
            "are promised: its stream is stuck"
        )

    async def _probe(self, handle: Handle) -> None:
        """Call the engine itself: the process of an engine that is stuck in a decode step can still answer
        heartbeats."""
        while True:
            await asyncio.sleep(self._run.config.supervision.heartbeat_timeout_s / 2)
            await self._run.patience.call(handle, "release", [])

    def _take_in(self, report: Report) -> None:
        run = self._run
        finished = run.state.apply(self.name, report)
        if report.leaving:
            self._noticed(self.name)
        if report.progress:
            run.waits.progress(self.name)
        run.events.emit("report", replica=self.name, **asdict(report.load))
        self._finished(finished)

    def _finished(self, finished: list[Trajectory]) -> None:
        run = self._run
        for t in finished:
            run.events.emit(
                "finished",
                trajectory_id=t.trajectory_id,
                tokens=len(t.columns),
                versions_min=t.columns.version_first,
                versions_max=t.columns.version_last,
                finish=t.finish,
            )
        run.request_scores(finished)
        if finished:
            run.pulse.fire()

    # ------------------------------------------------------------ out

    async def _carry_out(self, handle: Handle) -> None:
        """Consumes the mailbox, until it is closed."""
        call = self._run.patience.call
        while (first := await self._mailbox.first()) is not None:
            match first:
                case Submit(works):
                    await call(handle, "submit", works)
                case Abort(trajectory_ids):
                    await call(handle, "release", trajectory_ids)
                case Pull() as order:
                    await self._pull(handle, order)
                case Move() as order:
                    await self._move(handle, order)
                case Rest() as order:
                    await self._run.device.carry_out(handle, self.name, order)
            self._mailbox.done()
            self._run.pulse.fire()

    async def _pull(self, handle: Handle, order: Pull) -> None:
        run = self._run
        if order.discard:
            for trajectory in await self._release(handle):
                run.restart(trajectory, f"{self.name} goes to version {order.version}")
        endpoint = run.endpoint(run.state.replicas[self.name].host)
        try:
            if endpoint is None:
                return  # the relay of its host is gone; the next decision waits for the new relay
            with run.waits.waiting(self.name, f"version {order.version}", bounded=True):
                pulling = run.patience.call(handle, "pull", order.version, endpoint)
                served: Served | None = await self._mailbox.unless_closed(pulling)
        except (UnknownVersionError, TornVersionError):
            if order.version == self._missed:  # no newer version: without a wait the pulls would never end
                await asyncio.sleep(MISSED_S)
            self._missed = order.version
            return  # overwritten meanwhile; the next decision takes the newest version
        finally:
            run.state.replicas.end_pull(self.name)
        if served is None:
            return  # the replica leaves
        run.lineage.check_served(self.name, order.version, served)
        run.state.replicas.served(self.name, served.version)
        run.computes(self.name, served.computes)
        run.waits.prepared(self.name, f"version {served.version}")
        run.events.emit(
            "pulled",
            replica=self.name,
            version=served.version,
            digest=served.digest,
            pull_s=served.pull_s,
            swap_s=served.swap_s,
            in_flight=len(run.state.replicas[self.name].leased),
        )

    async def _move(self, handle: Handle, order: Move) -> None:
        """Each destination gets its share. The rest, and the share of a destination that is gone, are
        queued."""
        run, state = self._run, self._run.state
        moved = await self._release(handle)
        for destination in state.replicas.end_move(self.name, order.shares):
            num = order.shares[destination]
            share, moved = moved[:num], moved[num:]
            if share:
                run.submit(destination, [state.lease(trajectory, destination) for trajectory in share])
                run.events.emit(
                    "moved",
                    source=self.name,
                    destination=destination,
                    trajectories=[trajectory.trajectory_id for trajectory in share],
                    version=state.replicas[self.name].version,
                )

    async def _release(self, handle: Handle) -> list[Trajectory]:
        """Take back the trajectories that the replica still works on. The ones that it has just finished
        become complete."""
        state = self._run.state
        ids = list(state.replicas[self.name].leased)
        progress = await self._run.patience.call(handle, "release", ids)
        self._finished(state.progress(self.name, progress))
        released, leased = {one.trajectory_id for one in progress}, state.replicas[self.name].leased
        trajectories = [state.trajectories[i] for i in ids if i in released and i in leased]
        for trajectory in trajectories:
            state.unlease(trajectory)
        return trajectories
