"""The loops of a run. Decisions are the schedule's, records the state's and the ledger's; this file
waits, asks for decisions and moves bytes.

    decide      wakes on the pulse; orders refreshes, places lost work, admits groups, repacks
    replica     one per replica: its reports in, its orders (submit, pull, move) out
    environment one per reward worker: prompts and scores (see `scoring`)
    trainer     replays, then takes a batch, steps, commits, publishes, checkpoints; ends the run
    relay       opens the slots, stages what the trainer published
    flush       hands changed trajectories to the ledger
    watch       ends a run that makes no progress and says who waits for whom
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from millrace.config.schema import Config
from millrace.controller.pulse import Pulse, Waits
from millrace.controller.replica import Abort, Move, Order, Pull, ReplicaSession, Submit
from millrace.controller.scoring import EnvironmentPool
from millrace.controller.state import RunState, Shape
from millrace.controller.supervisor import RestartPolicy, Supervisor, WorkerSpec
from millrace.controller.trainer import TrainerSession
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, MillraceError
from millrace.core.events import Events
from millrace.core.protocols import Handle, Ledger, Runtime
from millrace.core.types import (
    BadPrompt,
    Endpoint,
    Published,
    Sampling,
    Score,
    Scored,
    ScoreRequest,
    State,
    Trajectory,
    Work,
)
from millrace.schedule.schedule import Schedule

DECISION_INTERVAL_S = 0.005  # decisions are at least this far apart: news collects in between
FLUSH_INTERVAL_S = 0.2
TICK_S = 1.0  # decisions happen at least this often


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run."""

    trainer: WorkerSpec
    relay: WorkerSpec
    replicas: tuple[WorkerSpec, ...]
    environments: tuple[WorkerSpec, ...]


class Controller:
    """One run, from the ledger's position to `config.steps`. `run()` returns when it is done."""

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet,
        runtime: Runtime,
        ledger: Ledger,
        schedule: Schedule,
        events: Events,
        checkpoints: str,
        export: str | None = None,
        check: Callable[[RunState], None] = lambda state: None,
    ) -> None:
        self.config, self.fleet, self.schedule, self.ledger, self.events = (
            config,
            fleet,
            schedule,
            ledger,
            events,
        )
        self.checkpoints, self.export = checkpoints, export
        self._runtime, self._check = runtime, check
        limits = config.supervision
        policy = RestartPolicy(
            limits.lease_s,
            limits.restarts,
            limits.restart_window_s,
            limits.backoff_s,
            limits.spawn_timeout_s,
        )
        self.supervisor = Supervisor(runtime, events, policy)
        self.pulse, self.waits = Pulse(), Waits()
        self.state = RunState(_shape(config), [spec.name for spec in fleet.replicas])
        recovered = ledger.recover()
        self.resumed_version = recovered.version
        self.state.version = recovered.version
        self.pool = EnvironmentPool(
            self.pulse,
            self.waits,
            next_group_id=recovered.next_group_id,
            prefetch=2 * config.batch.prompts,
            timeout_s=config.reward.timeout_s,
        )
        self.pool.on_score = self._scored
        for group in recovered.groups:
            self.request_scores(self.state.adopt(group))
        self.replicas = {spec.name: ReplicaSession(spec.name, self) for spec in fleet.replicas}
        self.trainer = TrainerSession(self)
        self.endpoint: Endpoint | None = None
        self.published: deque[Published] = deque()
        self.stopping = False
        self._repack_at_s = 0.0

    # ------------------------------------------------------------ the run

    def stop(self) -> None:
        """End the run after the step under way, with a checkpoint; the ledger keeps all the rest."""
        self.stopping = True
        self.pulse.fire()

    async def run(self) -> None:
        """Raises: the first fatal error, alone (MillraceError where it is one of ours)."""
        shape = self.state.shape
        self.events.emit(
            "run_started",
            steps=shape.steps,
            schedule=self.schedule.kind,
            group_size=shape.group_size,
            batch_groups=shape.batch_groups,
            replicas=list(self.replicas),
            resumed_version=self.resumed_version,
        )
        started, ok, reason = clock.now(), False, "interrupted"
        try:
            await self._run_loops()
            ok, reason = True, "stopped" if self.stopping else "done"
        except BaseExceptionGroup as group:
            error = _cause(group)
            reason = f"{type(error).__name__}: {error}"
            raise error from None
        finally:
            self.flush()
            accounting = self.ledger.accounting()
            self.events.emit(
                "run_ended",
                ok=ok,
                reason=reason,
                wall_s=clock.now() - started,
                accounting=asdict(accounting),
            )

    async def _run_loops(self) -> None:
        keep, fleet = self.supervisor.keep, self.fleet
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(keep(fleet.relay, self._relay), name="relay"),
                *(group.create_task(keep(s, self.pool.session), name=s.name) for s in fleet.environments),
                *(group.create_task(keep(s, self.replicas[s.name].run), name=s.name) for s in fleet.replicas),
                group.create_task(self._decide(), name="decide"),
                group.create_task(self._flush(), name="flush"),
                group.create_task(self._watch(), name="watch"),
            ]
            await keep(fleet.trainer, self.trainer.run)
            for loop in loops:
                loop.cancel()

    # ------------------------------------------------------------ decide

    async def _decide(self) -> None:
        """Consumes news of any kind; produces orders. Ends with the run."""
        while True:
            self.refresh()
            self._place()
            self._admit()
            self._repack()
            self._expire()
            self._check(self.state)
            await self.pulse.wait(timeout_s=min(TICK_S, self.schedule.repack_interval_s or TICK_S))
            await asyncio.sleep(DECISION_INTERVAL_S)

    def refresh(self) -> None:
        for order in self.schedule.refreshes(self.state.view()):
            self.state.replicas[order.replica_id].pulling = order.version
            self._order(order.replica_id, Pull(order.version, order.discard))

    def _place(self) -> None:
        """Lost and restarted trajectories go on, under their own version unless versions may mix."""
        state, works = self.state, _Outbox()
        if not state.queued:
            return
        lost = set() if self.schedule.mixes_versions else set(self.schedule.lost_for_good(state.view()))
        for trajectory in sorted(state.queued.values(), key=lambda t: t.trajectory_id):
            if trajectory.versions and trajectory.versions[-1] in lost:
                self.restart(trajectory, f"version {trajectory.versions[-1]} is no longer held")
            version = trajectory.versions[-1] if trajectory.versions else None
            birth = state.groups[trajectory.group_id].birth
            replica = self.schedule.place(state.view(), version, 1, birth=birth)
            if replica is not None:
                works.add(replica, state.lease(trajectory, replica))
        self._submit(works)

    def _admit(self) -> None:
        works, groups, skipped = _Outbox(), [], []
        for replica in self.schedule.admissions(self.state.view()):
            while (prompt := self.pool.next_prompt()) is not None:
                if isinstance(prompt, BadPrompt):
                    skipped.append(prompt)
                elif prompt.row_id in self.state.quarantined:
                    skipped.append(BadPrompt(prompt.group_id, prompt.row_id, "quarantined"))
                else:
                    break
            if prompt is None:
                break
            group, leases = self.state.admit(prompt, replica)
            groups.append(group)
            works.add(replica, *leases)
        if skipped:
            self.ledger.skip(skipped)
            for bad in skipped:
                self.events.emit("skipped", group_id=bad.group_id, row_id=bad.row_id, reason=bad.reason)
        if groups:
            self.ledger.admit(groups)
            self.events.emit("admitted", group_ids=[g.group_id for g in groups])
            self._submit(works)

    def _repack(self) -> None:
        """Every `repack_interval_s`, and at once after an update (which sets the time to 0)."""
        interval = self.schedule.repack_interval_s
        if interval is None or clock.now() < self._repack_at_s:
            return
        for move in self.schedule.moves(self.state.view()):
            self.state.replicas[move.destination].busy = True
            self._order(move.source, Move(move.destination))
        self._repack_at_s = clock.now() + interval
        for record in self.state.replicas.values():
            record.kv_used_previous = record.load.kv_used_tokens

    def repack_soon(self) -> None:
        self._repack_at_s = 0.0
        self.pulse.fire()

    def _expire(self) -> None:
        for group_id in self.schedule.overdue(self.state.view()):
            self.end_group(group_id, State.STALE, f"beyond the staleness bound at {self.state.version}")

    def end_group(self, group_id: int, state: State, reason: str) -> None:
        """End what is live of a group, and stop the replicas that work on it."""
        leased: dict[str, list[int]] = {}
        for member in self.state.groups[group_id].group.members:
            if member.state is State.LEASED:
                leased.setdefault(member.replica, []).append(member.trajectory_id)
        self.state.end_group(group_id, state, reason)
        for replica, ids in leased.items():
            self.replicas[replica].mail(Abort(ids))

    def _order(self, replica: str, order: Order) -> None:
        self.state.replicas[replica].busy = True
        self.replicas[replica].mail(order)

    def _submit(self, works: _Outbox) -> None:
        for replica, batch in works.items():
            self.submit(replica, batch)

    def submit(self, replica: str, works: list[Work]) -> None:
        self.replicas[replica].mail(Submit(works))
        self.events.emit(
            "leased",
            trajectory_ids=[w.trajectory_id for w in works],
            replica=replica,
            version=self.state.replicas[replica].version,
            resumed_tokens=sum(len(w.tokens) for w in works),
        )

    def restart(self, trajectory: Trajectory, reason: str) -> None:
        discarded = self.state.restart(trajectory)
        self.events.emit(
            "restarted", trajectory_id=trajectory.trajectory_id, discarded_tokens=discarded, reason=reason
        )

    # ------------------------------------------------------------ scores

    def request_scores(self, trajectories: Iterable[Trajectory]) -> None:
        for t in trajectories:
            assert t.finish is not None, t
            self.pool.request(ScoreRequest(t.trajectory_id, t.group_id, t.tokens, t.finish))

    def _scored(self, trajectory_id: int, score: Score) -> None:
        self.waits.progress()
        if self.state.score(trajectory_id, score) is None:
            return
        value = score.value if isinstance(score, Scored) else None
        self.events.emit(
            "scored",
            trajectory_id=trajectory_id,
            value=value,
            outcome=type(score).__name__.lower(),
            reason=getattr(score, "reason", ""),
        )
        self.pulse.fire()

    def poisoned(self, trajectory: Trajectory, replica: str) -> None:
        """Too many replicas died of it: give up the group and never draw its row again."""
        row_id = self.state.groups[trajectory.group_id].group.row_id
        reason = f"{self.state.shape.attempts} replicas died before its next token, last {replica}"
        self.state.quarantined.add(row_id)
        self.events.emit("quarantined", row_id=row_id, reason=reason)
        self.end_group(trajectory.group_id, State.ABANDONED, reason)

    # ------------------------------------------------------------ relay

    async def _relay(self, handle: Handle) -> None:
        """Consumes what the trainer published; produces pullable versions. Ends with the relay."""
        slot_bytes = await self.trainer.slot_bytes()
        timeout_s = self.config.supervision.step_timeout_s
        self.endpoint = await handle.call("open", slot_bytes, timeout_s=timeout_s)
        self.pulse.fire()
        try:
            while True:
                if not self.published:
                    await self.pulse.wait(timeout_s=TICK_S)
                    continue
                item = self.published.popleft()
                staged = await handle.call("stage", item.version, item.digest, timeout_s=timeout_s)
                self.state.newest, self.state.held = max(staged.held), tuple(staged.held)
                self.waits.progress()
                self.events.emit(
                    "staged", version=staged.version, digest=staged.digest, stage_s=staged.stage_s
                )
                self.pulse.fire()
        finally:
            self.endpoint, self.state.newest, self.state.held = None, -1, ()
            self.pulse.fire()
            self.published.clear()

    # ------------------------------------------------------------ ledger and watchdog

    def flush(self) -> None:
        state = self.state
        if state.dirty:
            self.ledger.update(list(state.dirty.values()))
            state.dirty.clear()
        for trajectory in state.ended:
            self.events.emit(
                "ended",
                trajectory_id=trajectory.trajectory_id,
                state=trajectory.state.value,
                reason=trajectory.reason,
            )
        state.ended.clear()
        self.ledger.flush()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self.flush()

    async def _watch(self) -> None:
        """No progress for `stall_s`: end the run and name every wait."""
        stall_s = self.config.supervision.stall_s
        self.waits.progress()
        while True:
            await asyncio.sleep(stall_s / 10)
            if clock.now() - self.waits.progressed_s >= stall_s:
                waits = self.waits.describe()
                self.events.emit("stalled", waits=waits)
                raise DeadlineExceeded(
                    f"no progress for {stall_s:g} s. Who waits for whom:\n  " + "\n  ".join(waits)
                )


class _Outbox(dict[str, list[Work]]):
    """Works by replica: one message each, so that they enter its engine together."""

    def add(self, replica: str, *works: Work) -> None:
        self.setdefault(replica, []).extend(works)


def _shape(config: Config) -> Shape:
    s = config.sampling
    return Shape(
        steps=config.steps,
        batch_groups=config.batch.prompts,
        group_size=config.batch.group_size,
        slots=config.rollout.slots,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        sampling=Sampling(
            s.max_tokens, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, stop_strings=s.stop
        ),
        seed=config.seed,
        attempts=config.supervision.attempts,
    )


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of ours in a tree of exception groups, else the first leaf."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, MillraceError)), leaves[0])
