"""How long a run needs to recover from kill -9, role by role, and what it keeps of its throughput.

    python benchmarks/recovery.py [--kills 10] [--window-s 60] [--only recovery|throughput|ranks] [--json]
                                   [--runtime local|ray]

Recovered means of use: a replica serves the current weights again, the relay has staged them, the
trainer has replayed and published, a reward worker is ready, and a new controller's first replica
serves (its processes import everything anew). One process is killed at a time, from whatever it is
doing. `throughput_kept`: trained tokens per second with one replica killed every 20 s, as a fraction of
those of the undisturbed window before it; `alive_fraction` is the part of the replicas that was alive.
With `--runtime ray` the workers are actors of a Ray cluster of three nodes, each in a network namespace
behind a link of 1 Gbit/s. Then the second node's raylet is killed, all of its processes, and its link is cut
for 20 s: each on a cluster of its own. `until_back`: every worker of that node is of use on another.
`until_step`: the next optimizer step. `fenced`: the workers that were cut off have ended themselves. At the
end of each run its accounts close. With `--only ranks` nothing else is measured, and the trainer has two
ranks, of which the second is on that node.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from common import parser_of, sized
from tiny_run import FOR_EVER, tiny_run

from millrace_chaos.attack import Attack
from millrace_chaos.child_run import ChildRun

ROLES = {"replica": "replica", "relay": "relay", "reward": "reward worker", "trainer": "trainer"}
KILL_EVERY_S = sized(20.0, 2.0)
REPLICAS = 2
TIMEOUT_S = 120.0
OVERRIDES = (
    f"steps={FOR_EVER}",
    "schedule.kind=laminar",
    f"rollout.replicas={REPLICAS}",
    "supervision.restarts=1000000",
    "supervision.restart_window_s=1",
    "supervision.attempts=1000000",
)


def wait(run: ChildRun, done: Callable[[], bool], attacks: list[Attack]) -> None:
    """Feed events to `attacks` until `done`."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not done():
        for event in run.poll():
            for attack in attacks:
                attack(event)
        if run.exit_code is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"the run did not go on:\n{run.last_words()}")
        time.sleep(0.005)


def kill(run: ChildRun, role: str, rng: random.Random) -> Attack:
    """Kill one process of `role`; a killed controller is started again at once."""
    name, pid = rng.choice(sorted(run.pids(role).items()))
    attack = Attack(role, name, "kill", run.version, time.time())
    run.kill(role, pid)
    return attack


def recovery_s(run: ChildRun, role: str, kills: int, rng: random.Random) -> list[float]:
    times = []
    for _ in range(kills):
        settled_s = time.monotonic() + rng.uniform(0.3, 1.3)
        wait(run, lambda until=settled_s: time.monotonic() >= until and bool(run.pids(role)), [])
        attack = kill(run, role, rng)
        wait(run, lambda attack=attack: attack.recovery_s is not None, [attack])
        times.append(attack.recovery_s)
    return times


def measure_recovery(kills: int, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    with tiny_run(*overrides) as run:
        run.start()
        wait(run, lambda: run.version >= 3, [])
        return recover_each(run, kills)


def recover_each(run: ChildRun, kills: int) -> dict[str, dict[str, float]]:
    rng, result = random.Random(0), {}
    for name, role in {**ROLES, "controller": "controller"}.items():
        times = recovery_s(run, role, kills, rng)
        result[name] = {"median": statistics.median(times), "worst": max(times), "kills": len(times)}
    return result


def tokens_per_s(run: ChildRun, window_s: float, kill_every_s: float | None) -> tuple[float, list[Attack]]:
    """Trained tokens per second over a window, and the kills in it, the first after half a period."""
    rng, attacks, began_s = random.Random(1), list[Attack](), time.monotonic()
    first = len(run.events)
    while (spent_s := time.monotonic() - began_s) < window_s:
        if kill_every_s is not None and spent_s > (len(attacks) + 0.5) * kill_every_s:
            attacks.append(kill(run, "replica", rng))
        wait(run, lambda until=time.monotonic() + 0.05: time.monotonic() >= until, attacks)
    steps = [e.fields for e in run.events[first:] if e.kind == "step" and not e.fields["replayed"]]
    return sum(step["trained_tokens"] for step in steps) / spent_s, attacks


def measure_throughput(window_s: float, overrides: Sequence[str]) -> dict[str, float]:
    with tiny_run(*overrides) as run:
        run.start()
        wait(run, lambda: run.version >= 10, [])
        calm, _ = tokens_per_s(run, window_s, None)
        attacked, attacks = tokens_per_s(run, window_s, KILL_EVERY_S)
        down_s = sum(attack.recovery_s or 0.0 for attack in attacks)
    return {
        "throughput_kept": attacked / calm,
        "alive_fraction": 1 - down_s / (REPLICAS * window_s),
        "tokens_per_s": calm,
        "tokens_per_s_attacked": attacked,
        "replica_kills": len(attacks),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=sized(10, 1), help="of each role")
    parser.add_argument(
        "--window-s", type=float, default=sized(60.0, 4.0), help="of each throughput measurement"
    )
    parser.add_argument("--only", choices=("recovery", "throughput", "ranks"))
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    options = parser.parse_args()
    result = on_ray(options) if options.runtime == "ray" else here(options)
    if options.json:
        print(json.dumps(result))


def on_ray(options: argparse.Namespace) -> dict[str, object]:
    """Imports Ray's tests only where they are asked for."""
    from cluster_faults import RANKS, measure_faults, run_on_cluster

    overrides, times = (*OVERRIDES, "supervision.heartbeat_timeout_s=3"), {}
    if options.only != "ranks":
        with run_on_cluster(*overrides) as (_, run):
            times = recover_each(run, options.kills)
        _tell(times)
    faults = measure_faults(*overrides, *(RANKS if options.only == "ranks" else ()))
    for name, numbers in faults.items():
        print(f"{name:12} " + "   ".join(f"{what} {value:6.2f}" for what, value in numbers.items()))
    return {"recovery_s": times, "faults_s": faults}


def here(options: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {}
    if options.only != "throughput":
        result["recovery_s"] = times = measure_recovery(options.kills, OVERRIDES)
        _tell(times)
    if options.only != "recovery":
        kept = measure_throughput(options.window_s, OVERRIDES)
        result |= kept
        for name, value in kept.items():
            print(f"{name:24} {value:10.3f}")
    return result


def _tell(times: Mapping[str, Mapping[str, float]]) -> None:
    for role, numbers in times.items():
        print(f"{role:12} median {numbers['median']:6.2f} s   worst {numbers['worst']:6.2f} s")


if __name__ == "__main__":
    main()
