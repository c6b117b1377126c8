"""What an environment between turns costs: time that episodes wait, CPU time, keys and values.

    python benchmarks/turns.py [--json] [--seeds 3] [--steps 6]

The time of an answer is log-normal. Its 99th percentile is 20 times its median.

The first figures are of the simulator. Both sides have the schedule `synchronous`, and the same lengths and
answers: a 7B model whose turns take some seconds, and answers with a median of 4 s. With environment-level
asynchrony each trajectory goes on as soon as its own answer is there. With whole-batch
turns the next turn of a batch begins when all of its trajectories have ended theirs, and the slowest of their
answers is there.

Redundancy is simulated too, in the same world, with the schedule `roll_flash` and a staleness of 0: without
redundant trajectories and groups, and with 2 trajectories a group and 2 groups a batch.

The next figures are of the real controller: its loops, messages, ledger and sinks, on a disk. The roles
compute nothing (`players.py`), in three other processes, whose CPU time is not counted. A turn is an
observation or a reward. Three runs of one fleet are measured, by `process_time` of the controller's process:

- full: a turn ends in the next report of its replica, 0.02 s later, and its answer takes no time;
- idle: the same, but no answer comes. What is left passes with time: heartbeats, empty reports, looks;
- paced: turns and answers take time, and a replica has one report a second.

The cost of a turn is the CPU time of the full run in `FULL_TURNS` turns, less that of the idle run in as many
seconds. It has the turn's share of admissions, leases, reports, flushes, rewards, batches, commits, events.

The last figure is of the torch engine alone, with a small random model. Eight episodes have eight turns each.
The prompt has 256 tokens, a turn about 24, and an observation 96. An answer takes 0 to 23 decode steps. Two
engines play the same episodes, one after the other: one keeps keys and values between turns, and one computes
them again.

asynchronous, whole_batches      trained tokens/s
env_async_over_batch             the first over the second
redundancy_gain                  trained tokens/s of `roll_flash`, with redundancy over without
redundancy_step_s                the same of the time of a step
redundancy_length                the same of the mean length of a trained trajectory
episodes_wait                    share of their time that episodes wait for answers, with asynchrony
controller_cpu_s_per_1000_turns  CPU seconds of the controller's process per 1,000 turns, as said above
controller_cpu_s_least, _most    the least and the most of the seeds
controller_cpu_s_with_time       all its CPU seconds in the paced run, per 1,000 turns
idle_cpu_s_per_s                 its CPU seconds a second in the idle run
full_turns_per_s, turns_per_s    of the full run, and of the paced run
kv_kept_over_dropped             sampled tokens/s with `rollout.keep_kv`, over those without
row_split_error                  relative difference of gradients, if every turn is a sequence of its own

Each figure is a median over seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from common import medians, parser_of, report, say, sized, table
from players import PlayedEnvironment, PlayedReplica, Troupe, _Completion

import millrace_sim.roles
from millrace.config.schema import Config
from millrace.controller.controller import Controller
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.supervisor import WorkerSpec
from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.core.pulse import Pulse
from millrace.core.types import Finish, Observed, Report, Score, ScoreRequest, Work
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.schedule.presets import build
from millrace_sim.config import SimulatedConfig
from millrace_sim.measure import Result, measure
from millrace_sim.roles.sim_reward_worker import SimRewardWorker
from millrace_sim.setup import scenario
from millrace_sim.simulation import Scenario

TAIL = 20.0  # the 99th percentile of an answer's time over its median
SIGMA = math.log(TAIL) / 2.326
TURNS = (4, 8)
PROMPTS, GROUP_SIZE = sized((8, 8), (4, 2))
REDUNDANT = sized(2, 1)  # trajectories a group, and groups a batch

# ---------------------------------------------------------------- simulated


class Gathered:
    """The trajectories of one batch, which make their turns together."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.arrived, self.slowest_s, self.number = 0, 0.0, 0
        self.answered = Pulse()


class WholeBatchWorker(SimRewardWorker):
    """Answers the turns of a whole batch at once, when the slowest answer is there."""

    batches: ClassVar[dict[int, Gathered]] = {}
    batch_groups = batch_members = 0

    async def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score | Observed]]:
        for request in requests:
            number = request.group_id // self.batch_groups
            batch = self.batches.setdefault(number, Gathered(self.batch_members))
            await self._together(batch, self._takes_s(request))
            observed = self._observed(request)
            batch.members -= observed is None
            yield request.trajectory_id, observed or self._score(request)

    async def _together(self, batch: Gathered, takes_s: float) -> None:
        """`batch.members` changes only between two turns: whoever ends does so when all have arrived."""
        number = batch.number
        batch.arrived, batch.slowest_s = batch.arrived + 1, max(batch.slowest_s, takes_s)
        if batch.arrived == batch.members:
            await asyncio.sleep(batch.slowest_s)
            batch.arrived, batch.slowest_s, batch.number = 0, 0.0, number + 1
            batch.answered.fire()
        while batch.number == number:
            await batch.answered.wait(timeout_s=3600.0)


def simulated(seed: int, steps: int, schedule: dict[str, object]) -> Scenario:
    tree = {
        "steps": steps,
        "batch": {"prompts": PROMPTS, "group_size": GROUP_SIZE},
        "schedule": schedule,
        "cluster": {"model": "Qwen2.5-7B", "trainer_devices": 8, "replicas": 2, "slots": 32},
        "lengths": {"kind": "lognormal", "median": 150.0, "p99": 600.0},
        "workload": {
            "prompt_tokens": (256, 512),
            "max_tokens": 1024,
            "turns": TURNS,
            "tool_s": (4.0, 4.0 * TAIL),
        },
    }
    made = scenario(SimulatedConfig.model_validate(tree), seed=seed)
    return replace(made, config=made.config.model_copy(update={"seed": seed}))


def result_of(seed: int, steps: int, *, whole_batches: bool) -> Result:
    WholeBatchWorker.batches = {}
    WholeBatchWorker.batch_groups, WholeBatchWorker.batch_members = PROMPTS, PROMPTS * GROUP_SIZE
    worker = WholeBatchWorker if whole_batches else SimRewardWorker
    with patch.object(millrace_sim.roles, "SimRewardWorker", worker):
        result, _ = measure(simulated(seed, steps, {"kind": "synchronous"}))
    return result


def asynchrony(seeds: int, steps: int) -> dict[str, float]:
    found = []
    for seed in range(seeds):
        ours, other = (result_of(seed, steps, whole_batches=whole) for whole in (False, True))
        found.append(
            {
                "asynchronous": ours.trained_tokens_per_s,
                "whole_batches": other.trained_tokens_per_s,
                "env_async_over_batch": ours.trained_tokens_per_s / other.trained_tokens_per_s,
                "episodes_wait": ours.episode_waits or 0.0,
            }
        )
        say(f"seed {seed}: {found[-1]}")
    table({f"seed {seed}": one for seed, one in enumerate(found)})
    return medians(found)


def redundancy(seeds: int, steps: int) -> dict[str, float]:
    found = []
    for seed in range(seeds):
        plain, more = (_roll_flash(seed, steps, redundant) for redundant in (0, REDUNDANT))
        gain = more.trained_tokens_per_s / plain.trained_tokens_per_s
        found.append(
            {
                "redundancy_gain": gain,
                "redundancy_step_s": more.step_s / plain.step_s,
                "redundancy_length": gain * more.step_s / plain.step_s,
            }
        )
        say(f"seed {seed}: {found[-1]}")
    return medians(found)


def _roll_flash(seed: int, steps: int, redundant: int) -> Result:
    schedule = {"kind": "roll_flash", "alpha": 0, "mix": "between"}
    schedule |= {"redundant_samples": redundant, "redundant_groups": redundant}
    result, _ = measure(simulated(seed, steps, schedule))
    return result


# ---------------------------------------------------------------- the real controller

REPLICAS, SLOTS, WORKERS = sized((16, 32, 16), (2, 32, 2))
TOOL_S = sized(0.5, 0.05)
SLICE_S, HEARTBEAT_S = 0.02, 0.5  # of a real replica: between work and its report, between empty reports
TURN_TOKENS, RATE = sized((100, 50.0), (10, 40.0))  # tokens of a turn, tokens a second of a trajectory
MAX_TOKENS, OBSERVATION = 1024, 32
CHECKED_EVERY = 5
WARM_UP, FULL_TURNS, PACED_TURNS, IDLE_S = sized((2_000, 10_000, 2_000, 15.0), (200, 1_000, 60, 5.0))
NEVER_S = 500.0


class ActingReplica(PlayedReplica):
    """Every turn has a length of its own."""

    async def submit(self, works: list[Work]) -> None:
        for work in works:
            draw = np.random.default_rng((work.trajectory_id, work.turn_start)).standard_normal()
            end = work.turn_start + max(1, int(self._median * np.exp(self._sigma * draw)))
            end = min(work.sampling.max_tokens, max(end, len(work.tokens) + 1))
            start = self._text.start(work.trajectory_id, work.sampling.max_tokens)
            self._works[work.trajectory_id] = _Completion(work, end, start)


class FullReplica(ActingReplica):
    """Ends each turn in its next report, and reports like a real replica: soon after work is there."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._submitted = Pulse()

    async def submit(self, works: list[Work]) -> None:
        await super().submit(works)
        self._submitted.fire()

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            if self._works or not await self._submitted.wait(HEARTBEAT_S):
                await asyncio.sleep(SLICE_S)
                yield self._report()


class ActingEnvironment(PlayedEnvironment):
    """Answers after a while; an episode has 4 to 8 turns."""

    def __init__(self, prompt_tokens: int, seed: int, tool_s: float) -> None:
        super().__init__(prompt_tokens)
        self._seed, self._tool_s = seed, tool_s

    async def _goes_on(self, request: ScoreRequest, num_done: int) -> bool:
        if self._tool_s:
            rng = np.random.default_rng((self._seed, request.trajectory_id, num_done))
            await asyncio.sleep(self._tool_s * math.exp(SIGMA * rng.standard_normal()))
        due = TURNS[0] + request.trajectory_id % (TURNS[1] - TURNS[0] + 1)
        return request.finish is Finish.TURN and num_done < due


def configuration(seed: int) -> Config:
    return Config.model_validate(
        {
            "steps": 1_000_000,
            "seed": seed,
            "model": {"path": "none"},
            "task": {"kind": "file", "path": "none", "answer": "none"},
            "reward": {
                "kind": "environment",
                "path": "played:Environment",
                "workers": WORKERS,
                "timeout_s": 600.0,
            },
            "batch": {"prompts": sized(32, 8), "group_size": sized(8, 4)},
            "sampling": {"max_tokens": MAX_TOKENS},
            "rollout": {"replicas": REPLICAS, "slots": SLOTS, "max_sequence_tokens": 16_384},
            "checkpoints": {"every": 1_000_000},
        }
    )


def fleet(config: Config, pace: str) -> Fleet:
    paced = pace == "paced"
    replica = {"slots": SLOTS, "rate": RATE if paced else 1e6, "median": TURN_TOKENS, "sigma": 0.6}
    acts = "turns:ActingReplica" if paced else "turns:FullReplica"
    tool_s = {"full": 0.0, "paced": TOOL_S, "idle": NEVER_S}[pace]
    environment = {"prompt_tokens": 256, "seed": config.seed, "tool_s": tool_s}
    return Fleet(
        trainer=WorkerSpec("trainer", "trainer", "players:PlayedTrainer", {"step_s": 0.1}),
        relays=(WorkerSpec("relay", "relay", "players:PlayedRelay", {"slots": config.relay_slots}),),
        replicas=tuple(
            WorkerSpec("replica", f"replica-{i}", acts, {"index": i / REPLICAS, **replica})
            for i in range(REPLICAS)
        ),
        reward_workers=tuple(
            WorkerSpec("reward worker", f"reward-worker-{i}", "turns:ActingEnvironment", environment)
            for i in range(WORKERS)
        ),
    )


async def controlled(directory: Path, seed: int, pace: str) -> dict[str, float]:
    """A run whose controller is this process: its CPU seconds and its turns, a second."""
    config, events, num_turns = configuration(seed), Events(clock.now, clock.wall), 0
    counts = ("finished",) if pace == "idle" else ("observed", "scored")
    counted = Pulse()

    def count(event: Event) -> None:
        nonlocal num_turns
        if event.kind in counts:
            num_turns += 1
            if num_turns % CHECKED_EVERY == 0:
                counted.fire()

    async def until(num: int) -> None:
        async with asyncio.timeout(300.0):
            while num_turns < num:
                await counted.wait(timeout_s=1.0)

    ledger, troupe = SqliteLedger(directory / "ledger.sqlite", run={}), Troupe(3, silence_s_max=60.0)
    async with open_sinks(events, config.observe, directory, {}):
        events.subscribe(count)
        controller = Controller(
            config,
            fleet=fleet(config, pace),
            runtime=troupe,
            ledger=ledger,
            schedule=build(config),
            events=events,
            checkpoints=str(directory),
            export=None,
        )
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(controller.run())
                await until(WARM_UP if pace == "full" else WARM_UP // 10)
                cpu_s, wall_s, before = time.process_time(), time.monotonic(), num_turns
                if pace == "idle":
                    await asyncio.sleep(IDLE_S)
                else:
                    await until(before + (FULL_TURNS if pace == "full" else PACED_TURNS))
                cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
                measured = num_turns - before
                controller.stop()
                await running
        finally:
            await troupe.close()
            ledger.close()
    return {"cpu_s_per_s": cpu_s / wall_s, "turns_per_s": measured / wall_s}


def control(seeds: int) -> dict[str, float]:
    """Each run in a controller's process of its own."""
    found = []
    for seed in range(seeds):
        runs = {}
        for pace in ("full", "idle", "paced"):
            command = [sys.executable, *sys.argv, "--one", str(seed), pace]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            runs[pace] = json.loads(done.stdout.splitlines()[-1])
            say(f"seed {seed}, {pace}: {runs[pace]}")
        full, idle_s, paced = runs["full"], runs["idle"]["cpu_s_per_s"], runs["paced"]
        found.append(
            {
                "controller_cpu_s_per_1000_turns": 1e3 * (full["cpu_s_per_s"] - idle_s) / full["turns_per_s"],
                "controller_cpu_s_with_time": 1e3 * paced["cpu_s_per_s"] / paced["turns_per_s"],
                "idle_cpu_s_per_s": idle_s,
                "full_turns_per_s": full["turns_per_s"],
                "turns_per_s": paced["turns_per_s"],
            }
        )
    costs = [one["controller_cpu_s_per_1000_turns"] for one in found]
    return medians(found) | {"controller_cpu_s_least": min(costs), "controller_cpu_s_most": max(costs)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--steps", type=int, default=sized(6, 3), help="of each simulated run")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as directory:
            seed, pace = options.one
            print(json.dumps(asyncio.run(controlled(Path(directory), int(seed), pace))))
        return
    from turns_kept import kept  # these need torch, and the other figures do not
    from turns_split import split

    figures = asynchrony(options.seeds, options.steps) | redundancy(options.seeds, options.steps)
    figures |= control(options.seeds) | kept() | split()
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
