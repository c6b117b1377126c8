"""The evaluator of a run while it goes on, and its reward workers: one coroutine for each of them."""

from __future__ import annotations

import asyncio

from millrace.controller.context import RunContext
from millrace.controller.evaluation.evaluator_session import EvaluatorSession
from millrace.controller.fault import may_go_on_without
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.supervisor import Exempt, Session, Supervisor, WorkerSpec, never
from millrace.core.errors import DataError, MillraceError, RewardError
from millrace.core.protocols import Handle


class LiveEvaluations:
    """Training needs no evaluation: a worker that cannot go on ends evaluations, and not the run."""

    def __init__(self, run: RunContext, fleet: Fleet, supervisor: Supervisor) -> None:
        self._run, self._fleet, self._supervisor = run, fleet, supervisor

    def begin(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """The tasks, which the controller cancels at the end of the run. None without evaluations."""
        run, fleet = self._run, self._fleet
        if (evaluator := fleet.evaluator) is None:
            return []
        if reason := run.evaluations.stop_reason():
            run.stop(reason)
        session, names = EvaluatorSession(run, evaluator.place.host), list(run.evaluations.sections)
        coroutines = {evaluator.name: self._keep(evaluator, session.run, session, names)}
        for spec, pool, name in zip(fleet.evaluation_reward_workers, session.pools, names, strict=True):
            coroutines[spec.name] = self._keep(spec, pool.session, session, [name], pool.is_scoring)
        return [group.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]

    async def _keep(
        self,
        spec: WorkerSpec,
        work: Session,
        session: EvaluatorSession,
        names: list[str],
        exempt: Exempt = never,
    ) -> None:
        """If worker `spec` has started and then cannot go on, the evaluations `names` are skipped."""
        begun = False

        async def begin(handle: Handle) -> None:
            nonlocal begun
            begun = True
            await work(handle)

        try:
            await self._supervisor.keep(spec, begin, exempt)
        except MillraceError as error:
            unusable = begun and isinstance(error, RewardError | DataError)  # no reward works, or no row
            if not (unusable or may_go_on_without(error, first=True, worked=begun, others=True)):
                raise
            session.give_up_evaluations(names, error)
        if spec is self._fleet.evaluator:
            await session.skip()
