"""What a round of decisions costs at the full fleet: the real state and the real schedule, nothing else.

    python benchmarks/control_decisions.py [--json] [--replicas 2000] [--rounds 9]

No process, no event loop, no ledger: replicas of 64 slots with groups of 16, each with a queue as in
`control_plane.py`. Before each round the processor's caches lose the fleet, as they do in a run. Medians of
CPU time of the thread.

round_ms      view, expire, refresh and admit: a round in which nothing has to be placed or repacked
resume_ms     view, restart and place: what a round costs more in which some turns go on
take_ms       view and take: whenever the trainer looks for a batch
parts_ms      of each decision
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from common import parser_of, report, say, sized
from control_plane import GROUP_SIZE, MAX_TOKENS, SLOTS, Setting, configuration

from millrace.controller.run_numbers import RunNumbers
from millrace.controller.state.relays import Relays
from millrace.controller.state.run_state import RunState
from millrace.core.types import Prompt, ReplicaLoad, State
from millrace.schedule.presets import build
from millrace.schedule.view import QueuedView

T = TypeVar("T")
GROUPS = SLOTS // GROUP_SIZE + 1  # of a replica: its slots are full, and some trajectories wait
RESUMED = 20  # turns that go on in one round
CACHE_BYTES = sized(1 << 25, 1 << 10)


def fleet(numbers: RunNumbers, replicas: int) -> RunState:
    """Replicas that have begun `GROUPS` groups each, of which some trajectories have ended."""
    relays, rng, prompt = Relays(["here"], ["here"]), random.Random(0), array("i", range(64))
    state = RunState(numbers, {f"replica-{i}": "here" for i in range(replicas)}, relays)
    relays.set_versions("here", [0])
    for name in state.replicas:
        state.replicas.up(name, 1)
        state.replicas.served(name, 0)
    for group_id, name in enumerate(sorted([*state.replicas] * GROUPS, key=lambda _: rng.random())):
        state.admit(Prompt(group_id, f"row-{group_id}", prompt, ""), name, now_s=0.0)
    for record in state.replicas.values():
        for trajectory in [*record.leased.values()][: rng.randrange(GROUP_SIZE // 2)]:
            state.unlease(trajectory)
            del state.queued[trajectory.trajectory_id]
            trajectory.state = State.SCORED
        load = ReplicaLoad(0, running=SLOTS, kv_used_tokens=SLOTS * 300, kv_capacity_tokens=SLOTS * 20_000)
        state.replicas.reported(record.name, load)
    return state


def measure(replicas: int, prompts: int, rounds: int) -> dict[str, Any]:
    config = configuration(Setting(replicas, 1, prompts), 10.0)
    schedule, others = build(config), array("q", range(CACHE_BYTES // 8))
    state = fleet(RunNumbers.of(config, schedule), replicas)
    queued = [QueuedView(None, 0, f"replica-{i % replicas}", MAX_TOKENS // 2) for i in range(RESUMED)]
    parts: defaultdict[str, list[float]] = defaultdict(list)

    def timed(part: str, decide: Callable[..., T], *args: Any) -> T:
        began_s = time.thread_time()
        value = decide(*args)
        parts[part].append(1e3 * (time.thread_time() - began_s))
        return value

    for _ in range(rounds):
        sum(others[::8])
        view = timed("view", state.view)
        timed("expire", schedule.expire, view)
        timed("refresh", schedule.refresh, view)
        timed("admit", schedule.admit, view)
        timed("restart", schedule.restart, view)
        timed("place", schedule.place, view, queued)
        timed("repack", schedule.repack, view)
        timed("take", schedule.take, view)
    medians = {part: statistics.median(times) for part, times in parts.items()}
    for part, median in medians.items():
        say(f"{part:8} {median:8.2f} ms")
    return {
        "round_ms": sum(medians[part] for part in ("view", "expire", "refresh", "admit")),
        "resume_ms": medians["view"] + medians["restart"] + medians["place"],
        "take_ms": medians["view"] + medians["take"],
        "parts_ms": medians,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=sized(2000, 4))
    parser.add_argument("--prompts", type=int, default=sized(4096, 4))
    parser.add_argument("--rounds", type=int, default=sized(9, 2))
    options = parser.parse_args()
    report(measure(options.replicas, options.prompts, options.rounds), as_json=options.json)


if __name__ == "__main__":
    main()
