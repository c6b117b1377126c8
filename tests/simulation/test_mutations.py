"""The explorer finds bugs: each of these, planted, breaks a promise under one of the stated seeds."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from millrace.controller import supervisor
from millrace.controller.state.lineage import Lineage
from millrace.controller.state.run_state import RunState
from millrace.controller.trainer_session import TrainerSession
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import (
    Batch,
    Finish,
    Progress,
    Report,
    Served,
    Staged,
    State,
    StepRecord,
    StepResult,
    Trajectory,
)
from millrace.ledger.recovery import Recovery
from millrace.ledger.sqlite import SqliteLedger
from millrace.schedule import schedule
from millrace.schedule.deadlines import Deadlines
from millrace.schedule.schedule import Schedule
from millrace.schedule.view import View
from millrace_sim import roles
from millrace_sim.explore import worlds
from millrace_sim.explore.verdicts import try_seed
from millrace_sim.roles.sim_relay import SimRelay
from millrace_sim.roles.sim_replica import SimReplica
from millrace_sim.roles.sim_trainer import SimTrainer, _result

Plant = Callable[[pytest.MonkeyPatch], None]


def partial_tokens_dropped_when_a_replica_dies(patch: pytest.MonkeyPatch) -> None:
    honest = RunState.unlease

    def unlease(state: RunState, trajectory: Trajectory) -> None:
        honest(state, trajectory)
        trajectory.columns = TokenColumns()

    patch.setattr(RunState, "unlease", unlease)


def tokens_kept_by_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunState, "restart", lambda state, trajectory: len(trajectory.columns))


def lease_of_a_dead_replica_kept(patch: pytest.MonkeyPatch) -> None:
    def replica_down(state: RunState, name: str) -> list[Trajectory]:
        record = state.replicas[name]
        record.alive, record.version, record.pulling = False, -1, -1
        return []

    patch.setattr(RunState, "replica_down", replica_down)


def slot_freed_before_the_last_tokens(patch: pytest.MonkeyPatch) -> None:
    honest = RunState.progress

    def progress(state: RunState, name: str, parts: list[Progress]) -> list[Trajectory]:
        early = [
            msgspec.structs.replace(part, finish=Finish.STOP) if part.start + len(part.columns) > 40 else part
            for part in parts
        ]
        return honest(state, name, early)

    patch.setattr(RunState, "progress", progress)


def group_ready_with_one_member_missing(patch: pytest.MonkeyPatch) -> None:
    honest = RunState._settle_group

    def settle(state: RunState, group_id: int) -> None:
        record = state.groups.get(group_id)
        if record is not None and record.ready_rank is None:
            scored = [m for m in record.group.members if m.state is State.SCORED]
            if len(scored) >= 2:
                record.ready_rank, state._ready = state._ready, state._ready + 1
                for member in scored:
                    member.state = State.BUFFERED
                return
        honest(state, group_id)

    patch.setattr(RunState, "_settle_group", settle)


def digest_not_compared(patch: pytest.MonkeyPatch) -> None:
    honest = SimRelay.stage

    async def stage(relay: SimRelay, version: int, digest: str) -> Staged:
        assert relay._endpoint is not None
        return await honest(relay, version, relay._world.slots_at(relay._endpoint.path).written(version))

    patch.setattr(SimRelay, "stage", stage)


def stale_version_served(patch: pytest.MonkeyPatch) -> None:
    """The replica says that it swapped, digest and all, and goes on with the weights that it had."""
    honest = SimReplica.pull

    async def pull(replica: SimReplica, version: int, endpoint: Any) -> Served:
        if version < 2:
            return await honest(replica, version, endpoint)
        digest = await replica._copy(version, endpoint)
        return Served(version, digest, pull_s=0.0, swap_s=0.0)

    patch.setattr(SimReplica, "pull", pull)


def served_version_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A replica takes the newest version instead of the one it was sent for, and nobody looks."""
    honest = SimReplica.pull

    async def pull(replica: SimReplica, version: int, endpoint: Any) -> Served:
        newest = replica._world.slots_at(endpoint.path).versions[-1]
        served = await honest(replica, newest, endpoint)
        return msgspec.structs.replace(served, version=version)

    patch.setattr(SimReplica, "pull", pull)
    patch.setattr(Lineage, "check_served", lambda lineage, replica, asked, served: None)


def heartbeat_never_asked_for(patch: pytest.MonkeyPatch) -> None:
    async def heartbeat(keeper: supervisor.Supervisor, handle: Any) -> None:
        await supervisor.asyncio.sleep(1e9)

    patch.setattr(supervisor.Supervisor, "_heartbeat", heartbeat)


def cancel_swallowed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supervisor, "_heed_cancel", lambda: None)


def step_applied_twice(patch: pytest.MonkeyPatch) -> None:
    """A trainer that does not know a repeated batch again."""

    async def step(trainer: SimTrainer, batch: Batch) -> StepResult:
        async with trainer._turn:
            trainer._weights = trainer._loaded().after(batch)
            return _result(batch, step_s=0.1)

    patch.setattr(SimTrainer, "step", step)


def replay_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A trainer that comes back goes on from its checkpoint as if nothing had been committed since."""
    honest = SqliteLedger.steps_after

    def steps_after(ledger: SqliteLedger, version: int) -> list[StepRecord]:
        return [] if version else honest(ledger, version)

    patch.setattr(SqliteLedger, "steps_after", steps_after)
    patch.setattr(SimTrainer, "step", _step_of_any_version)


async def _step_of_any_version(trainer: SimTrainer, batch: Batch) -> StepResult:
    async with trainer._turn:
        if trainer._last is None or trainer._last.version != batch.version + 1:
            trainer._weights = trainer._loaded().after(batch)
            trainer._last = _result(batch, step_s=0.1)
        return trainer._last


def relay_not_filled_again(patch: pytest.MonkeyPatch) -> None:
    """The trainer publishes each version once, also when the relay that held it is gone."""
    honest = TrainerSession._publish

    async def publish(session: TrainerSession, *arguments: Any) -> None:
        published = session._published_to
        if published is None or published[1] != session._run.state.version:
            await honest(session, *arguments)

    patch.setattr(TrainerSession, "_publish", publish)


def bound_off_by_one(patch: pytest.MonkeyPatch) -> None:
    honest = Deadlines._places
    patch.setattr(Deadlines, "_places", lambda book, deadline: honest(book, deadline + 1))


def take_ignores_deadlines(patch: pytest.MonkeyPatch) -> None:
    def choose(view: View, bound: Any, live: Any, ranked: Any) -> Any:
        return list(ranked[: view.batch_groups]) if len(ranked) >= view.batch_groups else None

    patch.setattr(schedule, "choose", choose)


def lost_trajectories_placed_anywhere(patch: pytest.MonkeyPatch) -> None:
    def place(rules: Schedule, view: View, queued: list[Any]) -> list[str | None]:
        anyone = next((replica.replica_id for replica in view.replicas if replica.serving), None)
        return [anyone] * len(queued)

    patch.setattr(Schedule, "place", place)


def resume_skips_a_prompt(patch: pytest.MonkeyPatch) -> None:
    honest = SqliteLedger.recover

    def recover(ledger: SqliteLedger, *args: Any) -> Recovery:
        found = honest(ledger, *args)
        found.next_group_id += bool(found.groups)
        return found

    patch.setattr(SqliteLedger, "recover", recover)


def resume_forgets_live_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunState, "adopt", lambda state, group: [])


def ended_without_a_reason(patch: pytest.MonkeyPatch) -> None:
    honest = RunState.end
    patch.setattr(RunState, "end", lambda state, trajectory, end, reason: honest(state, trajectory, end, ""))


class Echo(SimReplica):
    """Says again, in every report, what it gave back: under the lease of then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given_back: list[Progress] = []

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        parts = await super().release(trajectory_ids)
        self._given_back = [*self._given_back, *parts][-64:]
        return parts

    async def reports(self) -> AsyncIterator[Report]:
        async for report in super().reports():
            yield Report(self._given_back + report.progress, report.load)


def lease_number_ignored(patch: pytest.MonkeyPatch) -> None:
    """Found only with replicas that repeat themselves: no other message under an older lease arrives. And in
    few worlds: the newer schedules would replace the first of them."""
    honest = RunState.progress
    patch.setattr(roles, "SimReplica", Echo)
    patch.setattr(worlds, "NEWER_SHARE", 0.0)

    def progress(state: RunState, name: str, parts: list[Progress]) -> list[Trajectory]:
        leased = state.replicas[name].leased
        relabelled = [
            msgspec.structs.replace(part, lease=leased[part.trajectory_id].lease)
            for part in parts
            if part.trajectory_id in leased
        ]
        return honest(state, name, relabelled)

    patch.setattr(RunState, "progress", progress)


MUTATIONS: dict[Plant, range] = {
    partial_tokens_dropped_when_a_replica_dies: range(5),
    tokens_kept_by_a_restart: range(20),
    lease_of_a_dead_replica_kept: range(5),
    slot_freed_before_the_last_tokens: range(5),
    group_ready_with_one_member_missing: range(5),
    digest_not_compared: range(100),
    stale_version_served: range(5),
    served_version_not_compared: range(6, 25),
    heartbeat_never_asked_for: range(100),
    step_applied_twice: range(32, 80),
    replay_forgotten: range(11, 30),
    relay_not_filled_again: range(16, 100),
    bound_off_by_one: range(10),
    take_ignores_deadlines: range(11, 40),
    lost_trajectories_placed_anywhere: range(113, 260),
    resume_skips_a_prompt: range(5),
    resume_forgets_live_groups: range(5),
    ended_without_a_reason: range(5),
    lease_number_ignored: range(40, 100),
}
"""Seeds among which there is one that finds it, from a number soon before the first."""
if sys.version_info < (3, 13):  # since then a task group itself repeats a cancellation that met a failure
    MUTATIONS[cancel_swallowed] = range(11, 30)


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = next((seed for seed in MUTATIONS[plant] if try_seed(seed).problem), None)
    assert found is not None


def test_replicas_that_repeat_themselves_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "SimReplica", Echo)
    assert not any(try_seed(seed).problem for seed in range(10))
