"""The explorer of faults: thousands of seeded worlds, each a whole run of the real controller and ledger.

A run in a world with faults must end with every invariant kept, or stop because of corrupted weights. Every
other outcome is a failure, which names the command that replays the seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from millrace.config.schema import Config
from millrace.core.errors import DigestMismatchError
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import random_world
from millrace_sim.pool import process_pool
from millrace_sim.simulation import simulate


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one seed. `problem` is empty if the run is right; `digest` is of the event trace."""

    seed: int
    schedule: str
    problem: str = ""
    command: str = ""
    digest: str = ""
    num_events: int = 0
    restarts: int = 0
    resumes: int = 0
    virtual_s: float = 0.0
    noticed_corruption: bool = False


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of `count` seeds. The sums are over all seeds."""

    first_seed: int
    count: int
    failures: tuple[Verdict, ...]
    num_events: int
    restarts: int
    resumes: int
    virtual_s: float
    schedules: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.failures


def explore(
    first_seed: int,
    count: int,
    *,
    jobs: int = 1,
    on_seed: Callable[[Verdict], None] | None = None,
    config: Config | None = None,
    command: str = "millrace simulate",
) -> Exploration:
    """Run `count` worlds from `first_seed` on.

    `jobs` processes share the worlds (a script with more than one process needs an `if __name__ ==
    "__main__"`). `on_seed` is called for each world in order. `config`: a user's run, shortened to a few
    steps, instead of random small runs. `command`: the command line with which failures say how to replay
    them.
    """
    seeds = range(first_seed, first_seed + count)
    verdicts = []
    for verdict in _verdicts(partial(try_seed, config=config, command=command), seeds, jobs):
        verdicts.append(verdict)
        if on_seed is not None:
            on_seed(verdict)
    return Exploration(
        first_seed,
        count,
        failures=tuple(v for v in verdicts if v.problem),
        num_events=sum(v.num_events for v in verdicts),
        restarts=sum(v.restarts for v in verdicts),
        resumes=sum(v.resumes for v in verdicts),
        virtual_s=sum(v.virtual_s for v in verdicts),
        schedules=dict(Counter(v.schedule for v in verdicts)),
    )


def try_seed(seed: int, *, config: Config | None = None, command: str = "millrace simulate") -> Verdict:
    """Run one world. Every error is a problem, except that corrupted weights were noticed."""
    scenario = random_world(seed, config)
    schedule, promises = scenario.config.schedule.kind, Invariants(scenario)
    try:
        outcome = simulate(scenario, promises)
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, DigestMismatchError) and promises.num_corrupted:
            return Verdict(seed, schedule, noticed_corruption=True)
        problem = f"{type(error).__name__}: {error}"
        return Verdict(seed, schedule, problem, f"{command} --chaos 1 --seed {seed}")
    return Verdict(
        seed,
        schedule,
        digest=outcome.digest,
        num_events=len(outcome.events),
        restarts=outcome.restarts,
        resumes=outcome.resumes,
        virtual_s=outcome.wall_s,
    )


def _verdicts(run: Callable[[int], Verdict], seeds: range, jobs: int) -> Iterator[Verdict]:
    if jobs == 1:
        yield from map(run, seeds)
        return
    with process_pool(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=16)
