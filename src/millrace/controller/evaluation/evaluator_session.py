"""The evaluator's session. The evaluator is a replica apart from the others. It pulls one version, generates
the completions of an evaluation, and rests so that it computes for no more than its share of the time.

The schedule does not see the evaluator, and the evaluator works on no trajectory. It waits for versions that
training publishes anyway. So no batch waits for the evaluator, except for processors that both share.

If the evaluator dies, its successor goes on from the tokens so far under the same weights. An evaluation is
recorded complete, once. If the controller dies during an evaluation, the resumed run repeats it. If nothing
holds the weights any more, the nearest newer version is evaluated in their place, and the ledger says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from msgspec.structs import replace

from millrace.config.tables.evaluations import EvaluationSection
from millrace.controller.context import RunContext
from millrace.controller.episode import LANES
from millrace.controller.evaluation.due import rest_s
from millrace.controller.evaluation.evaluation_state import Underway
from millrace.controller.evaluation.prompt_attempt import PromptAttempt, next_begins, next_turns
from millrace.controller.reward_pool import RewardPool
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import (
    DataError,
    DeadlineExceeded,
    MillraceError,
    TornVersionError,
    UnknownVersionError,
    WorkerDied,
)
from millrace.core.protocols import Handle
from millrace.core.pulse import Pulse
from millrace.core.types import (
    Endpoint,
    EvaluationRecord,
    Observed,
    Prompt,
    Report,
    Sampling,
    Score,
    Served,
    Work,
)

TICK_S = 1.0
NAME = "evaluator"


@dataclass(slots=True)
class _Scoring:
    """For one evaluation: the pool of its reward workers, and its prompts once they are fetched."""

    pool: RewardPool
    prompts: list[Prompt] | None = None


class EvaluatorSession:
    """`host` is the evaluator's. `run` is the session of one incarnation. `pools` has a pool of reward
    workers for each evaluation, in their order."""

    def __init__(self, run: RunContext, host: str) -> None:
        self._run, self._host, self._state = run, host, run.evaluations
        self._news = Pulse()
        self._call = run.patience.call
        self._lease = 0
        self._scoring = {s.name: _Scoring(self._pool(s)) for s in self._state.sections.values()}

    @property
    def pools(self) -> list[RewardPool]:
        return [scoring.pool for scoring in self._scoring.values()]

    def _pool(self, section: EvaluationSection) -> RewardPool:
        reward = self._state.configs[section.name].reward
        episodes = reward.kind == "environment"
        return RewardPool(
            self._news,
            Waits(),
            partial(self._scored, section),
            next_group_id=0,
            prefetch=section.prompts if episodes else 1,
            timeout_s=reward.timeout_s,
            lanes=LANES if episodes else 1,
        )

    async def run(self, handle: Handle) -> None:
        """Consumes versions that are due; waits until a relay holds them; ends with the run."""
        while True:
            if self._state.underway is not None or await self._begin():
                await self._evaluate(handle)
            else:
                await self._run.to_relays.wait(timeout_s=TICK_S)

    def give_up_evaluations(self, names: Iterable[str], error: MillraceError) -> None:
        """Skip the evaluations `names` from now on."""
        self._run.give_up_evaluations(names, str(error))
        self._news.fire()

    async def skip(self) -> None:
        """In place of `run`, when there is no evaluator any more."""
        while True:
            if (under := self._state.underway) is not None:
                self._skip_given_up(under.section.name, under.version)
            self._look()
            await self._run.to_relays.wait(timeout_s=TICK_S)

    # ------------------------------------------------------------ which

    def _skip_given_up(self, name: str, version: int) -> None:
        self._skip(EvaluationRecord(name, version, reason=self._state.given_up[name]))

    def _look(self) -> None:
        run, state = self._run, self._state
        for record in state.look(run.state.version):
            self._skip(record)
        for name in state.given_up.keys() & state.waiting.wanted.keys():
            self._skip_given_up(name, state.waiting.wanted.pop(name))
        run.state.pinned = {self._host: frozenset(state.waiting.wanted.values())}

    async def _begin(self) -> bool:
        """Whether an evaluation is under way now."""
        state = self._state
        self._look()
        chosen = self._choice()
        if chosen is None:
            return False
        name, version = chosen
        prompts = await self._prompts(name)
        if prompts and self._choice() == chosen:
            skipped = state.begin(name, version, prompts, clock.now())
            if skipped is not None:
                self._skip(skipped)
        return state.underway is not None

    def _choice(self) -> tuple[str, int] | None:
        relays = self._run.state.relays
        return self._state.waiting.next(relays[self._host].versions, relays.pullable({self._host}))

    async def _prompts(self, name: str) -> list[Prompt]:
        """The first usable prompts of evaluation `name`, each row once; none if it is given up."""
        scoring, section = self._scoring[name], self._state.sections[name]
        if scoring.prompts is not None:
            return scoring.prompts
        prompts, rows = list[Prompt](), set[str]()
        while len(prompts) < section.prompts:
            prompt = scoring.pool.next_prompt()
            if name in self._state.given_up:
                return []
            if prompt is None:
                await self._news.wait(timeout_s=TICK_S)
                continue
            if prompt.row_id in rows:
                break  # the second epoch begins
            rows.add(prompt.row_id)
            if isinstance(prompt, Prompt):
                prompts.append(prompt)
        if not prompts:
            raise DataError(f"evaluation {name}: none of its {len(rows)} rows can be a prompt")
        scoring.pool.end_prompts()
        scoring.prompts = prompts
        return prompts

    # ------------------------------------------------------------ one evaluation

    async def _evaluate(self, handle: Handle) -> None:
        """The evaluation under way, within its deadline."""
        under = self._state.underway
        assert under is not None
        remaining_s = under.began_s + under.section.timeout_s - clock.now()
        try:
            async with asyncio.timeout(max(0.0, remaining_s)) as limit:
                await self._generate(handle, under)
                while under.unscored and under.section.name not in self._state.given_up:
                    await self._news.wait(timeout_s=TICK_S)
        except UnknownVersionError:
            self._forget(under)
            if (skipped := self._state.lose()) is not None:
                self._skip(skipped)
        except TimeoutError:
            if not limit.expired():
                raise
            await self._call(handle, "release", [one.index for one in under.completions])
            reason = f"it took longer than {under.section.timeout_s:g} s (`timeout_s`)"
            self._skip(EvaluationRecord(under.section.name, under.version, reason=reason))
        else:
            if under.unscored:
                return self._skip_given_up(under.section.name, under.version)
            self._record(under)

    async def _generate(self, handle: Handle, under: Underway) -> None:
        """Burst after burst, each of as many turns as the engine has slots. A rest follows each burst, and
        environments answer meanwhile. Ends when no completion has another turn."""
        for one in under.completions:
            one.lose_lease()
        if not under.ungenerated:
            return
        began_s, slots = clock.now(), self._run.config.rollout.slots
        await self._pull(handle, under.version)
        async with aclosing(handle.stream("reports")) as reports:
            while under.ungenerated and under.section.name not in self._state.given_up:
                for one in next_begins(under.completions, slots):
                    one.begin()
                    self._scoring[under.section.name].pool.request(under.score_request(one))
                if burst := next_turns(under.completions, slots):
                    await self._burst(handle, reports, under, burst)
                    await self._rest(rest_s(clock.now() - began_s, under.section.share))
                else:
                    await self._news.wait(timeout_s=TICK_S)
                began_s = clock.now()

    async def _rest(self, seconds: float) -> None:
        """At most until training is over: then no other worker computes."""
        end_s = clock.now() + seconds
        while not self._state.finishing and (remaining_s := end_s - clock.now()) > 0:
            await self._run.to_relays.wait(timeout_s=min(remaining_s, TICK_S))

    async def _pull(self, handle: Handle, version: int) -> None:
        """Waits for a relay that has just restarted.

        Raises: UnknownVersionError: the weights are gone. DigestMismatchError.
        """
        run, relays, served = self._run, self._run.state.relays, None
        while served is None:
            pullable = relays.pullable({self._host})
            if max(pullable, default=-1) > version not in pullable:
                raise UnknownVersionError(f"version {version} is no longer held")
            endpoint = run.endpoint(self._host)
            if endpoint is not None and version in relays[self._host].versions:
                served = await self._served(handle, version, endpoint)
            if served is None:
                await run.to_relays.wait(timeout_s=TICK_S)
        run.lineage.check_served(NAME, version, served)
        run.computes(NAME, served.computes)

    async def _served(self, handle: Handle, version: int, endpoint: Endpoint) -> Served | None:
        """None: the slots of the relay have just gone, or were overwritten."""
        try:
            served: Served = await self._call(handle, "pull", version, endpoint)
        except (UnknownVersionError, TornVersionError):
            return None
        return served

    async def _burst(
        self,
        handle: Handle,
        reports: AsyncGenerator[Report, None],
        under: Underway,
        burst: list[PromptAttempt],
    ) -> None:
        self._lease += 1
        await self._call(handle, "submit", [self._work(under, one) for one in burst])
        ungenerated, answered = {one.index: one for one in burst}, under.config.reward.kind == "environment"
        while ungenerated:
            for progress in (await self._next(reports)).progress:
                attempt = ungenerated.get(progress.trajectory_id)
                if attempt is not None and attempt.take(progress, answered=answered):
                    del ungenerated[attempt.index]
                    self._scoring[under.section.name].pool.request(under.score_request(attempt))
            self._note_progress()

    async def _next(self, reports: AsyncGenerator[Report, None]) -> Report:
        """A replica promises two reports in this time."""
        timeout_s = self._run.config.supervision.heartbeat_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await anext(reports)
        except StopAsyncIteration:
            raise WorkerDied(f"{NAME}: its report stream ended") from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{NAME}: no report for {timeout_s:g} s") from None

    def _work(self, under: Underway, one: PromptAttempt) -> Work:
        """The seed follows from (evaluation, prompt, attempt), so it is the same for every version."""
        config, name = self._run.config, under.section.name
        sampling = replace(Sampling(**dict(config.sampling)), logprobs=0, token_masks=False, routing=False)
        seed = int.from_bytes(blake2b(f"{name}:{config.seed}".encode(), digest_size=8).digest()) >> 1
        return one.lease(self._lease, sampling, seed, config.episode_tokens)

    # ------------------------------------------------------------ results

    def _scored(self, section: EvaluationSection, score_id: int, score: Score | Observed) -> None:
        """An episode that nobody waits for any more is ended, also one that goes on."""
        under = self._state.underway
        if under is None or under.section is not section or not under.answer(score_id, score):
            self._scoring[section.name].pool.forget([score_id])
        self._note_progress()

    def _forget(self, under: Underway) -> None:
        """Nobody waits for its scores any more: the next evaluation has its reward worker for itself."""
        self._scoring[under.section.name].pool.forget(under.score_ids)

    def _note_progress(self) -> None:
        """After the end of training only evaluations are the run's progress."""
        self._news.fire()
        if self._state.finishing:
            self._run.waits.progress(NAME)

    def _record(self, under: Underway) -> None:
        run, name = self._run, under.section.name
        took_s = clock.now() - under.began_s
        record = EvaluationRecord(name, under.version, under.metrics(), took_s=took_s)
        run.ledger.evaluated(record, [one.record() for one in under.completions])
        best = self._state.ended(record)
        run.waits.progress(NAME)
        run.events.emit(
            "evaluated", name=name, version=record.version, best=best, took_s=took_s, metrics=record.metrics
        )
        if not self._state.finishing and (reason := self._state.stop_reason()):
            run.stop(reason)
        run.pulse.fire()

    def _skip(self, record: EvaluationRecord) -> None:
        """The same version is not tried again."""
        under = self._state.underway
        if under is not None and (under.section.name, under.version) == (record.name, record.version):
            self._forget(under)
        self._run.ledger.evaluated(record, [])
        self._state.ended(record)
        self._run.events.emit(
            "evaluation_skipped", name=record.name, version=record.version, reason=record.reason
        )
        self._run.pulse.fire()
