"""The trainer's session: replay, then take -> step -> commit -> publish -> checkpoint, until done.

A version is digested while the next step is computed. It is complete at the relay before that step is
committed. A checkpoint is written while the next steps are computed. The ledger records it once its files are
complete.

A trainer that crashed goes on as a resumed run does. It loads the newest checkpoint, then repeats the later
steps in their order, each with its own batch. So each batch is trained once per lineage of the final weights,
and the repeated versions equal the first ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

from msgspec.structs import asdict

from millrace.controller.context import RunContext
from millrace.controller.group_ends import expire
from millrace.controller.pace import rest_s
from millrace.controller.reference_session import ReferenceSession
from millrace.controller.state.groups import make_batch
from millrace.controller.step_event import StepFields, mean_staleness, staleness_histogram
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, TrainingError, UnknownVersionError
from millrace.core.protocols import Handle
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Published,
    StepRecord,
    StepRejected,
    StepResult,
    TrainerState,
)

TICK_S = 1.0
REJECTED_MAX = 3  # batches in a row: then the weights are suspect, and not the data
GO_BACK = (
    "`--resume` tries other trajectories; `--resume --from-version N` goes back to version N and trains "
    "on other trajectories from there"
)


class TrainerSession:
    """`checkpoints` and `export` are directories (export None: off). `reference` scores batches before
    their steps."""

    def __init__(
        self,
        run: RunContext,
        *,
        checkpoints: str,
        export: str | None,
        reference: ReferenceSession | None = None,
    ) -> None:
        self._run, self._checkpoints, self._export = run, checkpoints, export
        self._reference = reference
        self.turn, self.done = TrainerTurn(), False
        self._trains: Handle | None = None  # the incarnation that has the turn, or had it last
        self._caught_up = False  # since the last death of a trainer that had the turn
        self._loaded: TrainerState | None = None
        self._published_to: tuple[object, int] | None = None  # (root relays, version) of the last copy
        self._publishing: asyncio.Task[None] | None = None  # one at a time
        self._checkpointed = -1  # the version saved last, or being saved
        self._saving: asyncio.Task[None] | None = None  # one at a time
        self._rejected_in_a_row = 0
        self._step_fields = StepFields()
        self._catching_up = False  # a catch-up that finds it true follows a trainer that died in a catch-up
        self._call = run.device.call

    async def slot_bytes(self) -> int:
        """The bytes of one version in a relay. Waits until a trainer has loaded."""
        while self._loaded is None:
            await self._run.pulse.wait(timeout_s=TICK_S)
        return self._loaded.slot_bytes

    async def run(self, handle: Handle) -> None:
        """Returns when the last step is committed, checkpointed and exported. A standby first waits for its
        turn."""
        while not self.turn.take(handle.name):
            await self._run.pulse.wait(timeout_s=TICK_S)
        await self._follow(handle)
        try:
            async with asyncio.TaskGroup() as background:
                self._publishing = self._saving = None
                await self._train(handle, background)
        finally:
            for host in self._run.trainer_hosts:
                self._run.state.relays.arrived(host, self._run.state.version)
        self.done = True
        self._run.pulse.fire()

    async def died(self, name: str) -> None:
        """Trainer `name` died. If another goes on, wait until that has caught up: a start would slow it."""
        self._caught_up &= self.turn.holder != name
        self.turn.give_back(name)
        self._run.pulse.fire()
        await asyncio.sleep(0)  # a standby takes the turn
        while not self._caught_up and self.turn.holder not in (None, name):
            await self._run.pulse.wait(timeout_s=TICK_S)

    async def _follow(self, handle: Handle) -> None:
        """Wait until the incarnation before is gone, and its memory with it. It has been killed."""
        before, self._trains = self._trains, handle
        if before is not None and not before.dead.done():
            await asyncio.wait([before.dead], timeout=self._run.config.supervision.heartbeat_timeout_s)
        if before is not None and before.name != handle.name:
            self._run.events.emit("took_over", name=handle.name, epoch=handle.epoch)

    async def _train(self, handle: Handle, background: asyncio.TaskGroup) -> None:
        run, state = self._run, self._run.state
        await self._catch_up(handle, background)
        taken_s: float | None = None
        while True:
            await self._publish(handle, background)
            if state.version >= run.config.steps:
                break
            free_s = clock.now()
            if taken_s is not None:
                state.measured.step.add(free_s - taken_s)
            batch = await self._take(handle, background)
            if batch is None:
                break
            taken_s = clock.now()
            result = await self._step(handle, batch)
            await self._await_publishing()
            if isinstance(result, StepRejected):
                self._reject(result)
                if result.weights_lost:
                    await self._catch_up(handle, background)
                continue
            self._rejected_in_a_row = 0
            record = self._commit(batch, result)
            state.measured.batch_trained(mean_staleness(batch))
            self._emit_step(batch, record, result, wait_s=taken_s - free_s, replayed=False)
            run.pulse.fire()
            if state.version % run.config.checkpoints.every == 0:
                await self._publish(handle, background)
                await self._checkpoint(handle, background, state.version)
        await self._checkpoint(handle, background, state.version)
        await self._await_publishing()
        await self._await_saving()
        if self._export is not None:
            await self._call(handle, "export", self._export)
        await self._evaluated(handle, background)

    async def _evaluated(self, handle: Handle, background: asyncio.TaskGroup) -> None:
        """Wait for the evaluations of the last version, each within its own deadline. A relay that restarts
        meanwhile gets that version again."""
        run, evaluations = self._run, self._run.evaluations
        limit_s = clock.now() + evaluations.longest_s + run.config.supervision.step_timeout_s
        evaluations.finishing = True
        with run.waits.waiting("the run", "its last evaluations", bounded=True):
            while not (run.stopping or evaluations.idle(run.state.version) or clock.now() > limit_s):
                await self._publish(handle, background)
                await run.pulse.wait(timeout_s=TICK_S)
        if not run.stopping and (missing := evaluations.describe_waits()):
            warning = f"the run ends without what did not come in time: {'; '.join(missing)}"
            run.events.emit("warned", source="evaluations", reason=warning)

    async def _catch_up(self, handle: Handle, background: asyncio.TaskGroup) -> None:
        """Load the newest checkpoint and replay the committed steps after it.

        If the last trainer process died before it had caught up, every replayed step is saved. Then even a
        process that lives for little more than one step makes progress.
        """
        await self._await_saving()
        run, died_in_catch_up, self._catching_up = self._run, self._catching_up, True
        checkpoint = run.ledger.checkpoint()
        path = checkpoint.path if checkpoint else None
        with run.waits.waiting("trainer", "its weights to load", bounded=True):
            self._loaded = await self._call(handle, "load", path)
        run.computes("trainer", self._loaded.computes)
        run.arithmetic = self._loaded.arithmetic
        self._published_to = None
        self._checkpointed = self._loaded.version
        run.pulse.fire()
        for record in run.ledger.steps_after(self._loaded.version):
            batch = await self._batch_of(record)
            result = await self._step(handle, batch)
            if isinstance(result, StepRejected):
                raise TrainingError(
                    f"step {record.version} was committed, and now its batch is rejected: {result.reason}."
                    f"\n  The machine computes differently from before. {GO_BACK}"
                )
            self._emit_step(batch, record, result, wait_s=0.0, replayed=True)
            if died_in_catch_up:
                await self._checkpoint(handle, background, record.version)
                await self._await_saving()
        self._catching_up, self._caught_up = False, True

    async def _batch_of(self, record: StepRecord) -> Batch:
        """The batch of a committed step, as it was. Other coroutines run between two groups."""
        groups = []
        for group_id in record.group_ids:
            groups.append(self._run.ledger.group(group_id))
            await asyncio.sleep(0)
        return make_batch(record.version - 1, groups)

    async def _take(self, handle: Handle, background: asyncio.TaskGroup) -> Batch | None:
        """Wait for a batch; meanwhile publish to a relay that restarted. None: the run is to stop.

        A batch stays taken until its step ends: after a trainer's death the next one gets the same batch.
        """
        run, state = self._run, self._run.state
        with run.waits.waiting("trainer", f"{run.config.batch.prompts} ready groups"):
            while not run.stopping:
                await self._publish(handle, background)
                began_s = clock.now()
                if not state.taken and state.num_ready >= run.config.batch.prompts:
                    state.take(run.schedule.take(state.view()) or ())
                pause_s = max(run.pace.look_s, rest_s(began_s))
                if state.taken:
                    batch = state.batch()
                    self._assert_bound(batch)
                    return batch
                await run.device.give_back(handle)
                await run.pulse.wait(timeout_s=TICK_S)
                if pause_s:
                    await asyncio.sleep(pause_s)
        return None

    def _assert_bound(self, batch: Batch) -> None:
        """Check the schedule's staleness bound on the tokens themselves, before they are trained on."""
        bound, histogram = self._run.schedule.staleness_max, staleness_histogram(batch)
        assert bound is None or max(histogram, default=0) <= bound, (batch.version, histogram, bound)

    async def _step(self, handle: Handle, batch: Batch) -> StepResult | StepRejected:
        if self._reference is not None:
            batch = await self._reference.scored(batch)
        with self._run.waits.waiting("trainer", f"its step from version {batch.version}", bounded=True):
            result: StepResult | StepRejected = await self._call(handle, "step", batch)
        self._run.waits.progress(*self._run.trainers)
        return result

    def _reject(self, rejected: StepRejected) -> None:
        """The trajectories at fault end, durably, before the next try: a resumed run does not take them
        again.

        Raises TrainingError: REJECTED_MAX batches in a row were not finite.
        """
        run, self._rejected_in_a_row = self._run, self._rejected_in_a_row + (not rejected.unfit)
        reason = rejected.reason if rejected.unfit else f"not finite at {rejected.reason}"
        run.state.reject(rejected.trajectory_ids, reason)
        run.flush()
        run.events.emit(
            "step_rejected",
            version=rejected.version,
            trajectory_ids=rejected.trajectory_ids,
            reason=rejected.reason,
            in_a_row=self._rejected_in_a_row,
        )
        if self._rejected_in_a_row >= REJECTED_MAX:
            raise TrainingError(
                f"{REJECTED_MAX} batches in a row were rejected at version {rejected.version}, the last at "
                f"{rejected.reason}.\n  The weights may be at fault. {GO_BACK}"
            )
        run.pulse.fire()

    def _commit(self, batch: Batch, result: StepResult) -> StepRecord:
        """Record the step in one durable transaction, before its version is published."""
        run = self._run
        group_ids = [group.group_id for group in batch.groups]
        trained = [s.trajectory_id for group in batch.groups for s in group.sequences]
        record = StepRecord(result.version, group_ids, trained, dict(result.metrics))
        expire(run, run.state.view())  # in the transaction of the step: nothing is live after the last one
        run.update_ledger()
        run.ledger.commit_step(record)
        run.selection.learn(run.ledger, [record])
        run.earlier.learn([record])
        run.state.committed(result.version)
        return record

    async def _publish(self, handle: Handle, background: asyncio.TaskGroup) -> None:
        """Copy the current version to the current relays of the trainer's hosts, once. Only the copy is
        waited for."""
        run = self._run
        roots = run.roots
        if not roots or self._published_to == (target := (roots, run.state.version)):
            return
        await self._await_publishing()
        try:
            await self._call(handle, "publish", *roots)
        except UnknownVersionError:
            return await self._await_another_relay(roots)
        self._published_to = target
        for host in run.trainer_hosts:
            run.state.relays.put(host, run.state.version)
        self._publishing = background.create_task(self._offer_to_relays(handle, *target), name="publish")

    async def _offer_to_relays(self, handle: Handle, roots: tuple[Endpoint, ...], version: int) -> None:
        """Wait until the copied `version` is complete in its slots. Then the relays may stage it."""
        run = self._run
        with run.waits.waiting("publication", f"the digest of version {version}", bounded=True):
            published: Published = await self._call(handle, "await_published")
        if run.roots != roots:
            return  # a root relay died meanwhile, and its slots with it
        run.lineage.note_digest(published)
        if len(roots) == 1:
            run.to_stage.append(published)
        else:
            run.state.relays.wrote(version, published.digest)
        run.to_relays.fire()
        run.events.emit("published", **asdict(published))
        run.pulse.fire()

    async def _await_publishing(self) -> None:
        """Wait until no version is being digested. One that fails ends the session."""
        if self._publishing is not None:
            await self._publishing

    async def _await_another_relay(self, roots: tuple[Endpoint, ...]) -> None:
        """The slots are gone, so a relay died. Wait until its supervision notices the death."""
        run, paths = self._run, " or ".join(endpoint.path for endpoint in roots)
        with run.waits.waiting("trainer", f"a relay other than {paths}"):
            deadline_s = clock.now() + run.config.supervision.heartbeat_timeout_s
            while run.roots == roots:
                if clock.now() > deadline_s:
                    raise DeadlineExceeded(f"the slots at {paths} are gone, yet their relay answers")
                await run.pulse.wait(timeout_s=TICK_S)

    async def _checkpoint(self, handle: Handle, background: asyncio.TaskGroup, version: int) -> None:
        """Begin to save the trainer, which is at `version`, unless that is saved already."""
        if self._checkpointed == version:
            return
        began_s = clock.now()
        await self._await_saving()
        waited_s = clock.now() - began_s
        with self._run.waits.waiting("trainer", "its checkpoint", bounded=True):
            await self._call(handle, "checkpoint", self._checkpoints)
        self._checkpointed = version
        self._saving = background.create_task(self._commit_checkpoint(handle, waited_s), name="checkpoint")

    async def _commit_checkpoint(self, handle: Handle, waited_s: float) -> None:
        """`waited_s`: how long training waited for the checkpoint before."""
        run = self._run
        with run.waits.waiting("checkpoint", "its files", bounded=True):
            info: CheckpointInfo = await self._call(
                handle, "await_saved", run.evaluations.spared(run.state.version)
            )
        run.ledger.commit_checkpoint(info)
        run.events.emit("checkpoint", **asdict(info) | {"stall_s": info.stall_s + waited_s})

    async def _await_saving(self) -> None:
        """Wait until no checkpoint is under way. One that fails ends the session."""
        if self._saving is not None:
            await self._saving

    def _emit_step(
        self, batch: Batch, record: StepRecord, result: StepResult, *, wait_s: float, replayed: bool
    ) -> None:
        run = self._run
        screened, run.state.screened = run.state.screened, Counter()
        run.events.emit(
            "step",
            version=record.version,
            **self._step_fields.of(batch, result),
            wait_s=wait_s,
            groups_ready=run.state.num_ready,
            **({"groups_screened": dict(screened)} if screened else {}),
            replayed=replayed,
            **({} if replayed else run.selection.figures()),
            **({"episodes": counts} if (counts := run.pool.episodes) else {}),
            accounting=dataclasses.asdict(run.ledger.accounting()),
        )


class TrainerTurn:
    """One trainer at a time has the turn, from its first command until its death is known. A trainer whose
    error ends the run keeps it, so that no other trainer goes on meanwhile."""

    def __init__(self) -> None:
        self.holder: str | None = None

    def take(self, name: str) -> bool:
        """Whether trainer `name` has the turn now. It gets the turn if nobody has it."""
        self.holder = self.holder or name
        return self.holder == name

    def give_back(self, name: str) -> None:
        """Trainer `name` is dead. Nothing happens if another trainer has the turn."""
        if self.holder == name:
            self.holder = None
