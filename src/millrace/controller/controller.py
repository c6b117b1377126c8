"""A run: its workers, its loops and its end.

decide         on any news: the schedule's decisions and safeguards     decide.py
replica        one for each replica: reports in, orders out     replica_session.py, fleet/live_replicas.py
reward worker  one for each reward worker: prompts, scores     reward_pool.py, fleet/live_reward_workers.py
trainer        replay, then take, step, commit, publish, checkpoint; ends the run     trainer_session.py
evaluator      one, with its own reward workers, if the run has evaluations     evaluation/
reference      one, if the trainer has no copy of the start weights     reference_session.py
relay          one for each host: stages versions of the trainer, or fetches them from other relays
               fleet/relay_session.py, fleet/live_relays.py
flush          writes changed trajectories to the ledger
watch          reports who waits for whom when the run makes no progress, and then ends the run
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from millrace.config.inert import inert
from millrace.config.schema import Config
from millrace.controller.context import RunContext
from millrace.controller.decide import Decisions
from millrace.controller.evaluation.live_evaluations import LiveEvaluations
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.fleet.live_replicas import LiveReplicas, LiveTrainers
from millrace.controller.fleet.live_reward_workers import LiveRewardWorkers
from millrace.controller.pace import PACE, Pace
from millrace.controller.reference_session import ReferenceSession
from millrace.controller.state.run_state import RunState
from millrace.controller.supervisor import Supervisor
from millrace.controller.trainer_session import TrainerSession
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, MillraceError, after, leaves
from millrace.core.events import Events
from millrace.core.protocols import Ledger, Runtime
from millrace.schedule.schedule import Schedule

COLLECT_AFTER = 100_000  # objects; Python's default is 700
INTERRUPTED = "interrupted by the user"
EMPTY_S_MAX = 86_400.0  # a run without replicas ends after this time, unless a user adds some
QUIET_S = 20.0  # without progress, until the first notice of who waits for whom; each doubles the next


class Controller:
    """Takes a run from the ledger's position to `config.steps`.

    `checkpoints` and `export` are directories (export None: off). `check` sees the state after every
    round of decisions; `on_stall` is called when the run makes no progress.
    """

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
        export: str | None,
        check: Callable[[RunState], None] = lambda state: None,
        on_stall: Callable[[], None] = lambda: None,
        pace: Pace = PACE,
    ) -> None:
        self._fleet, self._on_stall = fleet, on_stall
        self._run = RunContext(
            config, fleet=fleet, ledger=ledger, schedule=schedule, events=events, pace=pace
        )
        on_heartbeat = self._run.patience.on_heartbeat
        self._supervisor = Supervisor(runtime, events, config.supervision, self._run.waits, on_heartbeat)
        self._decisions = Decisions(self._run, check)
        self._reference = ReferenceSession(self._run) if fleet.reference else None
        self._trainer = TrainerSession(
            self._run, checkpoints=checkpoints, export=export, reference=self._reference
        )
        reward_workers = fleet.reward_workers
        least = config.reward.workers if config.reward.workers_max else len(reward_workers)
        self._reward_workers = LiveRewardWorkers(self._run, reward_workers, self._supervisor, least=least)
        self.replicas = LiveReplicas(self._run, fleet, self._supervisor, self._trainer.slot_bytes)

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    def stop(self) -> None:
        """End the run after the step under way, with a checkpoint. The ledger has everything else."""
        self._run.stop("stopped")

    async def run(self) -> None:
        """Returns when the last step is committed, checkpointed and exported, or the run was stopped.

        Raises: the first fatal error, alone: a MillraceError if there is one.
        """
        self._announce()
        started = clock.now()
        try:
            with _rare_collections():
                await self._run_loops()
            self._run.flush()
        except BaseException as raised:
            error = _cause(raised) if isinstance(raised, BaseExceptionGroup) else raised
            with after(error):
                self._emit_end(started, ok=False, reason=ended_by(error))
            if error is raised:
                raise
            raise error from None
        self._emit_end(started, ok=True, reason=self._run.stop_reason if self._run.stopping else "done")

    def _emit_end(self, started_s: float, *, ok: bool, reason: str) -> None:
        accounting, took_s = asdict(self._run.ledger.accounting()), clock.now() - started_s
        self._run.events.emit("run_ended", ok=ok, reason=reason, took_s=took_s, accounting=accounting)

    def _announce(self) -> None:
        run, several = self._run, len(self._fleet.relays) > 1
        run.events.emit(
            "run_started",
            steps=run.config.steps,
            schedule=run.schedule.kind,
            group_size=run.state.numbers.group_size,
            batch_groups=run.config.batch.prompts,
            replicas=list(run.mailboxes),
            resumed_version=run.resumed_version,
            inert=inert(run.config),
            **({"hosts": self._fleet.hosts} if several else {}),
        )

    async def _run_loops(self) -> None:
        async with asyncio.TaskGroup() as group:
            self.replicas.relays.begin(group)
            self._reward_workers.begin(group)
            self.replicas.begin(group)
            loops = LiveEvaluations(self._run, self._fleet, self._supervisor).begin(group)
            if (spec := self._fleet.reference) is not None and self._reference is not None:
                session = self._supervisor.keep(spec, self._reference.run)
                loops.append(group.create_task(session, name=spec.name))
            loops += [
                group.create_task(self._decisions.loop(), name="decide"),
                group.create_task(self._flush(), name="flush"),
                group.create_task(self._watch(), name="watch"),
            ]
            await LiveTrainers(self._run, self._fleet, self._supervisor, self._trainer).keep()
            self.replicas.end()
            self._reward_workers.end()
            for loop in loops:
                loop.cancel()

    async def _flush(self) -> None:
        """Writes changes to the ledger every `flush_s`. The commit of a step is such a write too."""
        run, flush_s = self._run, self._run.pace.flush_s
        while True:
            await asyncio.sleep(run.written_s + flush_s - clock.now())
            if clock.now() >= run.written_s + flush_s:
                run.flush()

    async def _watch(self) -> None:
        """Without progress, report who waits for whom. After `stall_s` the run ends with that report, unless
        an open wait has its own deadline. A run without replicas may wait longer."""
        patience_s, waits = self._run.config.supervision.stall_s, self._run.waits
        waits.progress()
        progressed_s, notice_s = waits.progressed_s, min(QUIET_S, patience_s)
        while True:
            await self._sleep_on_watch(min(1.0, patience_s / 10))
            empty = not self._run.mailboxes
            stall_s = EMPTY_S_MAX if empty else patience_s
            if waits.progressed_s != progressed_s:
                progressed_s, notice_s = waits.progressed_s, min(QUIET_S, patience_s)
            quiet_s = clock.now() - progressed_s
            stalled = quiet_s >= stall_s and not waits.bounded
            if quiet_s < notice_s and not stalled:
                continue
            lines = describe_waits(self._run)
            starting = waits.bounded and not any(map(waits.fruitful, self._run.mailboxes))
            self._run.events.emit("starting" if starting else "stalled", waits=lines, quiet_s=quiet_s)
            if not (starting or empty):
                self._on_stall()
            if stalled:
                raise DeadlineExceeded(
                    f"no progress for {stall_s:g} s. Who waits for whom:\n  " + "\n  ".join(lines)
                )
            notice_s *= 2

    async def _sleep_on_watch(self, seconds: float) -> None:
        """Time in which this process was stopped is no stall: its host may have been suspended."""
        due_s = clock.now() + seconds
        await asyncio.sleep(seconds)
        late_s = clock.now() - due_s
        if late_s > seconds:
            self._run.waits.discount(late_s)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python's cyclic collector visits every live trajectory each time, and finds almost no cycles. So it
    runs only after `COLLECT_AFTER` new objects. That saves a third of the CPU time at the rates of 1000
    GPUs."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def ended_by(error: BaseException) -> str:
    """Why a run ended, for people."""
    if not isinstance(error, Exception):
        return INTERRUPTED
    return f"{type(error).__name__}: {error}"


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first MillraceError in a tree of exception groups, or else the first error."""
    errors = list(leaves(group))
    return next((e for e in errors if isinstance(e, MillraceError)), errors[0])


def describe_waits(run: RunContext) -> list[str]:
    """Who waits for whom, one line each: open waits, the longest first, what workers do, then idle work."""
    state = run.state
    lines = run.waits.describe() + run.patience.activities()
    for name, replica in state.replicas.items():
        if not replica.alive:
            lines.append(f"{name} is not up")
        elif replica.leased:
            what = f"{len(replica.leased)} trajectories at version {replica.version}"
            lines.append(f"{name} owes tokens of {what}")
    if not state.replicas:
        lines.append("the run has no replica: `millrace scale RUN --replicas N` adds some")
    if state.queued:
        lines.append(f"{len(state.queued)} trajectories wait for a replica")
    if run.pool.num_requests:
        lines.append(f"{run.pool.num_requests} completions wait for a reward worker")
    return lines + run.evaluations.describe_waits()
