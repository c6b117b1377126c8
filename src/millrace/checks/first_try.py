"""What a run is given, tried before the run: its task and its reward by one prompt and one call of the
reward, and an algorithm and a schedule of the user.

The trial of a reward happens as in the run: in a process of its own, under the reward's deadline and memory
limit. So it finds a reward that hangs, ends its process or needs too much memory. As in the run, a row that
ends a worker is skipped and reported. When a second row ends a worker too, the run is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from millrace.checks.rehearsal import BrokenPromise, Scene, rehearse
from millrace.config.freeze import recorded
from millrace.config.schema import Config
from millrace.config.tables.algorithms import FunctionAlgorithm
from millrace.config.tables.schedules import FunctionSchedule
from millrace.core import clock
from millrace.core.completion.columns import token_array
from millrace.core.errors import ConfigError, DataError, DeadlineExceeded, RewardError, WorkerDied, boundary
from millrace.core.protocols import Handle, Runtime
from millrace.core.types import BadPrompt, Failed, Finish, Prompt, Score, ScoreRequest
from millrace.episodes.first_look import TriedCompletion
from millrace.evaluation.scoring import Timed, drain, start_worker
from millrace.evaluation.trials import unmet
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.schedule.presets import build
from millrace.tasks.families import family_notes

FIRST_LOOK = "millrace.episodes.first_look:FirstLook"
REASONS_SHOWN = 3
MANY = 0.9
"""The share of distinct prompts below which a warning says how few there are."""
TRIED_ROWS, PROVED_ROWS, PROVED_S = 3, 16, 10.0
DEATHS_MAX = 2
"""After so many workers that a row or a call of the reward ended, the run is refused."""


@dataclass(frozen=True)
class TaskFacts:
    """The first usable prompt in the order of the run, and how many rows the task has. How many of the first
    `num_probed` rows are unusable, and `reason`, why the first of these is. `keys`, `notes`: see
    `FirstLook`."""

    prompt: Prompt
    rows: int
    num_probed: int
    num_unusable: int
    reason: str
    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstTry:
    """`tried` are calls of the reward, up to the first that did not fail. `own_warnings` are of `try_own`,
    and of held-out prompts."""

    task: TaskFacts
    tried: list[tuple[TriedCompletion, Timed]]
    own_warnings: list[str] = field(default_factory=list)


def try_first(config: Config) -> FirstTry:
    """The trial of training. The parts of a mixture, and the tasks and rewards of evaluations, are tried too;
    only a failure is reported.

    Raises: ConfigError, DataError, RewardError: the run could not have a prompt, a reward, or a step."""
    own_warnings = try_own(config)
    first = replace(asyncio.run(_try_first(config)), own_warnings=own_warnings)
    others = {f"`task.parts` ({name})": part for name, part in config.by_part.items() if name}
    others |= {f"`evaluations` ({one.name})": config.of_evaluation(one) for one in config.evaluations}
    measured = {f"`evaluations` ({one.name})" for one in config.evaluations if one.canary is None}
    for which, other in others.items():
        try:
            held_out = asyncio.run(_try_first(other))
        except (ConfigError, DataError, RewardError) as error:
            raise type(error)(f"{which}: {error}") from error
        if which in measured:
            own_warnings += repeated(which, held_out.task, first.task)
    return first


def repeated(which: str, held_out: TaskFacts, trained: TaskFacts) -> Iterator[str]:
    """A sentence if prompts of an evaluation are among those that training begins with."""
    known = set(trained.keys)
    if num := sum(key in known for key in held_out.keys):
        yield (
            f"{which}: {num} of its first {len(held_out.keys)} prompts are among the first "
            f"{len(trained.keys)} prompts of training: it measures what was learnt by heart, too"
        )


def warnings(config: Config, first: FirstTry) -> Iterator[str]:
    """Problems that would spoil the run without ending it, one sentence each."""
    yield from first.own_warnings
    yield from family_notes(config)
    task, prompts = first.task, config.batch.prompts
    yield from task.notes
    if task.num_unusable:
        yield (
            f"{task.num_unusable} of the first {task.num_probed} rows cannot be used and are skipped; the "
            f"first: {task.reason}"
        )
    if (distinct := len(set(task.keys))) < MANY * len(task.keys):
        yield (
            f"{distinct} of the first {len(task.keys)} prompts are distinct: rows repeat them, and held-out "
            "rows may, too"
        )
    if prompts > task.rows:
        yield (
            f"a step takes `batch.prompts` ({prompts}) prompts, and the task has {task.rows} rows: each row "
            f"comes {prompts / task.rows:.3g} times in a step"
        )
    attempt, timed = first.tried[0]
    if isinstance(timed.score, Failed):
        yield (
            f"{attempt.row_id}: the reward fails on {attempt.kind}: {timed.score.reason}. In the run such a "
            "trajectory ends as failed, and is counted"
        )


async def _try_first(config: Config) -> FirstTry:
    runtime = LocalRuntime()
    try:
        worker, prompts = await _first_prompts(runtime, config)
        usable = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        unusable = [prompt.reason for prompt in prompts if isinstance(prompt, BadPrompt)]
        if not usable:
            raise DataError(f"none of the first {len(prompts)} prompts can be used; the first: {unusable[0]}")
        rows = await worker.call("num_rows", timeout_s=config.supervision.spawn_timeout_s)
        attempts = await worker.call(
            "attempts", usable[:TRIED_ROWS], timeout_s=config.supervision.spawn_timeout_s
        )
        notes = await worker.call("notes", timeout_s=config.supervision.spawn_timeout_s)
        keys = await _keys(worker, config)
        if worker.dead.done():
            worker = await _start(runtime, config)
        reason = "".join(unusable[:1])
        task = TaskFacts(usable[0], rows, len(prompts), len(unusable), reason, keys, tuple(notes))
        worker, tried = await _try_reward(runtime, worker, config, attempts)
        if config.reward.prove_references:
            await _prove(worker, config, usable[:PROVED_ROWS])
        return FirstTry(task, tried)
    finally:
        await runtime.close()


async def _keys(worker: Handle, config: Config) -> tuple[str, ...]:
    """None where a later row ends the worker: the run skips that row."""
    try:
        return tuple(await worker.call("prompt_keys", timeout_s=config.supervision.spawn_timeout_s))
    except (WorkerDied, DeadlineExceeded):
        worker.kill()
        await worker.dead
        return ()


async def _first_prompts(runtime: Runtime, config: Config) -> tuple[Handle, list[Prompt | BadPrompt]]:
    """A worker, and the first prompts. Raises: DataError: `DEATHS_MAX` rows each ended a worker."""
    prompts: list[Prompt | BadPrompt] = []
    worker, deaths = await _start(runtime, config), 0
    while True:
        any_usable = any(isinstance(prompt, Prompt) for prompt in prompts)
        try:
            async with asyncio.timeout(config.supervision.spawn_timeout_s):
                async for prompt in worker.stream("probed", len(prompts), any_usable):
                    prompts.append(prompt)  # noqa: PERF401 - those before a death count
            return worker, prompts
        except (WorkerDied, TimeoutError) as error:
            worker.kill()
            worker, deaths = await _start(runtime, config), deaths + 1
            group_id = len(prompts)
            [row_id] = await worker.call("row_ids", [group_id], timeout_s=config.supervision.spawn_timeout_s)
            reason = f"{row_id}: making its prompt ends the worker: {error or 'it takes too long'}"
            if deaths >= DEATHS_MAX:
                raise DataError(f"{reason}\n  It is the second row that does: look at the data") from error
            prompts.append(BadPrompt(group_id, row_id, reason))


async def _prove(worker: Handle, config: Config, prompts: list[Prompt]) -> None:
    """Raises: DataError: a reference answer has not full marks by the reward, or cannot be scored."""
    until_s = clock.now() + PROVED_S
    references = await worker.call("references", prompts, timeout_s=config.supervision.spawn_timeout_s)
    tried: list[tuple[TriedCompletion, Timed]] = []
    for reference in references:
        if clock.now() >= until_s:
            break
        request = ScoreRequest(0, reference.group_id, token_array(reference.tokens), Finish.STOP)
        scored: list[Timed] = []
        lost = await drain(worker, config.reward.timeout_s, [request], scored)
        tried.append((reference, scored[0]))
        if lost:
            break
    unproven = list(filter(None, (unmet(one, timed.score) for one, timed in tried)))
    if unproven:
        raise DataError(
            f"{len(unproven)} of {len(tried)} reference answers that were tried cannot have full marks:\n"
            + "\n".join(f"  {one}" for one in unproven[:REASONS_SHOWN])
            + "\n  Correct the rows, or what the reward reads of them: `millrace try-task` shows each. To "
            "train all the same, set `reward.prove_references` to false"
        )


async def _start(runtime: Runtime, config: Config) -> Handle:
    """Raises: DataError: the worker ends while it opens the task; the errors of the worker."""
    try:
        return await start_worker(runtime, config, FIRST_LOOK)
    except WorkerDied as error:
        raise DataError(
            f"opening the task, up to its first usable row, or the reward ends the process: {error}"
        ) from error


async def _try_reward(
    runtime: Runtime, worker: Handle, config: Config, attempts: list[TriedCompletion]
) -> tuple[Handle, list[tuple[TriedCompletion, Timed]]]:
    """The worker that is left, and the calls. A row whose scoring ends a worker is not tried again. Raises:
    RewardError: every call fails."""
    tried: list[tuple[TriedCompletion, Timed]] = []
    costly: set[int] = set()
    for attempt in attempts:
        if attempt.group_id in costly:
            continue
        request = ScoreRequest(0, attempt.group_id, token_array(attempt.tokens), Finish.STOP)
        scored: list[Timed] = []
        lost = await drain(worker, config.reward.timeout_s, [request], scored)
        tried.append((attempt, scored[0]))
        if not isinstance(scored[0].score, Failed):
            return worker, tried
        if lost:
            worker.kill()
            costly.add(attempt.group_id)
            if len(costly) >= DEATHS_MAX:
                break
            worker = await _start(runtime, config)
    failures = dict.fromkeys(f"  {a.row_id}, {a.kind}: {_reason(timed.score)}" for a, timed in tried)
    raise RewardError(
        "the reward fails at every call:\n"
        + "\n".join(list(failures)[:REASONS_SHOWN])
        + "\n  Correct it: `millrace try-task` calls it alone"
    )


def _reason(score: Score) -> str:
    return score.reason if isinstance(score, Failed) else ""


# ---------------------------------------------------------------- an algorithm and a schedule


TRIAL = "millrace.trainer.first_step:AlgorithmTrial"
SCENES = (Scene(), Scene(crash_probability=0.02, fail_probability=0.05))
SHOWN = 200  # characters of what a rehearsal says


def try_own(config: Config) -> list[str]:
    """Warnings, one sentence each. Raises: ConfigError: a function of the user raises, or makes no step."""
    warnings = []
    if isinstance(config.schedule, FunctionSchedule):
        warnings += _try_schedule(config, config.schedule.path)
    if isinstance(config.algorithm, FunctionAlgorithm):
        warnings += asyncio.run(_try_algorithm(config, config.algorithm.path))
    return warnings


async def _try_algorithm(config: Config, path: str) -> list[str]:
    """In a process of its own, like the trainer: the algorithm needs torch, and may hang."""
    runtime, limit_s = LocalRuntime(), config.supervision.spawn_timeout_s
    try:
        trial = await runtime.spawn("trainer", TRIAL, {"config": recorded(config)}, timeout_s=limit_s)
        warnings: list[str] = await trial.call("tried", timeout_s=limit_s)
        return warnings
    except (WorkerDied, DeadlineExceeded) as error:
        raise ConfigError(f"`algorithm.path` ({path}) ends or blocks its process: {error}") from error
    finally:
        await runtime.close()


def _try_schedule(config: Config, path: str) -> list[str]:
    """Try its decisions on small runs in pure data, with and without crashes."""
    try:
        with boundary(f"`schedule.path` ({path})", "a rehearsal of its decisions", ConfigError):
            for scene in SCENES:
                schedule = build(config)
                schedule.describe()
                rehearse(schedule, scene, seed=0)
    except BrokenPromise as broken:
        return [f"`schedule.path` ({path}), in a rehearsal: {str(broken)[:SHOWN]}"]
    return []
