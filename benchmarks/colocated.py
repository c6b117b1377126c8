"""One device in turns against the synchronous schedule: speed on the same cores, and memory of both roles.

    python benchmarks/colocated.py [--rounds 3] [--steps 4] [--json]

Both runs train the same prompts with the same seeds, with one replica and at staleness 0, at a size at which
products of matrices are most of the work: 30 M parameters and 64 completions of 96 tokens a step. In turns
each side computes on all cores while the other sleeps. Without turns the trainer has all cores too, and the
replica one of two (`placement/thread_plan.py`).

`colocated_over_synchronous`: trained tokens/s from the first lease to the last step, the median over rounds.
`partial_over_synchronous`: the same with `areal` at staleness 1, which keeps unfinished trajectories over the
turn of the trainer. In a row, seconds a step: `training_s` in the trainer, `pull_s` until the replica serves
the version, `hand_over_s` of workers that fall asleep or wake. The rest is generation.

`peak_over_largest_role`: the most anonymous resident memory of trainer and replica together, over that of the
larger role alone, both of the run in turns. Left out are what the forkserver has, of which every worker is a
fork: the interpreter with its libraries. The relay is left out too: both runs have it.
`synchronous_peak_over_largest_role`: the same of the other run, where both roles are there at once.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import median, medians, parser_of, report, say, sized, table
from large import SIZES
from peers.start import TASKS, make_untrained, write_prompts

from millrace_chaos.child_run import ChildRun

TASK = TASKS["short"]
GROUPS, GROUP = sized((8, 8), (2, 2))
LOOK_S = 0.05
RUN_S_MAX = 900.0
CONFIG = f"""
steps = {{steps}}
seed = {{seed}}
model = {{{{ path = "start", device = "cpu" }}}}
task = {{{{ kind = "file", path = "prompts.jsonl" }}}}
reward = {{{{ kind = "exact", extract = '{TASK.extract}' }}}}
batch = {{{{ prompts = {GROUPS}, group_size = {GROUP} }}}}
sampling = {{{{ max_tokens = {TASK.max_tokens}, ignore_eos = true }}}}
optimizer.lr = 1e-5
checkpoints.every = 1000
observe.tensorboard = false

[rollout]
replicas = 1
slots = {GROUPS * GROUP}
max_sequence_tokens = {TASK.max_sequence_tokens}
"""
RUNS = {
    "synchronous": ("schedule.kind=synchronous",),
    "colocated": ("schedule.kind=synchronous", "rollout.colocated=true"),
    "partial": ("schedule.kind=areal", "schedule.eta=1", "rollout.colocated=true"),
}


class RoleMemory:
    """The most anonymous resident bytes of each role so far, above those of the forkserver."""

    def __init__(self, run: ChildRun) -> None:
        self._run, self._base = run, 0
        self.together, self.alone = 0, defaultdict[str, int](int)

    def look(self) -> None:
        total = 0
        self._base = max([self._base, *map(anonymous_bytes, self._run.pids("forkserver").values())])
        for role in ("trainer", "replica"):
            grown = sum(map(self._grown, self._run.pids(role).values()))
            self.alone[role] = max(self.alone[role], grown)
            total += grown
        self.together = max(self.together, total)

    def _grown(self, pid: int) -> int:
        return max(0, anonymous_bytes(pid) - self._base)


def anonymous_bytes(pid: int) -> int:
    """Resident, of a process. 0: it is gone."""
    with suppress(OSError):
        match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
        return 0 if match is None else int(match[1]) * 1024
    return 0


def play(config: Path, directory: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run, to its end."""
    run = ChildRun(config, directory, overrides)
    memory, deadline_s = RoleMemory(run), time.monotonic() + RUN_S_MAX
    try:
        run.start()
        while run.exit_code is None and time.monotonic() < deadline_s:
            run.poll()
            memory.look()
            time.sleep(LOOK_S)
        run.poll()
        if run.exit_code != 0:
            raise SystemExit(f"{directory.name}: {run.last_words()}")
    finally:
        run.end()
    return figures(run) | {
        "trainer_mb": memory.alone["trainer"] / 1e6,
        "replica_mb": memory.alone["replica"] / 1e6,
        "together_mb": memory.together / 1e6,
    }


def figures(run: ChildRun) -> dict[str, Any]:
    steps = [event for event in run.events if event.kind == "step"]
    began_s = next(event.time_s for event in run.events if event.kind == "leased")
    wall_s = steps[-1].time_s - began_s

    def a_step(kinds: tuple[str, ...], *names: str) -> float:
        events = (event for event in run.events if event.kind in kinds)
        return sum(event.fields[name] for event in events for name in names) / len(steps)

    return {
        "tokens_per_s": sum(step.fields["trained_tokens"] for step in steps) / wall_s,
        "step_s": wall_s / len(steps),
        "training_s": a_step(("step",), "step_s"),
        "pull_s": a_step(("pulled",), "pull_s", "swap_s"),
        "hand_over_s": a_step(("slept", "woke"), "took_s"),
    }


def measure(rounds: int, steps: int) -> dict[str, Any]:
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_untrained(TASK, directory / "start", **SIZES["30m"].shape)
        write_prompts(TASK, directory / "prompts.jsonl", count=1000, seed=0)
        for number in range(rounds):
            config = directory / f"{number}.toml"
            config.write_text(CONFIG.format(steps=steps, seed=number))
            for name, overrides in RUNS.items():
                measured[name].append(play(config, directory / f"{name}-{number}", overrides))
                say(f"{number + 1}/{rounds} {name}: {measured[name][-1]}")
    rows = {name: medians(each) for name, each in measured.items()}

    def over(name: str) -> float:
        pairs = zip(measured[name], measured["synchronous"], strict=True)
        return median([one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs])

    def peak(name: str) -> float:
        ratios = (one["together_mb"] / max(one["trainer_mb"], one["replica_mb"]) for one in measured[name])
        return max(ratios)

    return {
        "colocated_over_synchronous": over("colocated"),
        "partial_over_synchronous": over("partial"),
        "peak_over_largest_role": max(peak("colocated"), peak("partial")),
        "synchronous_peak_over_largest_role": peak("synchronous"),
        "rows": rows,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--steps", type=int, default=sized(4, 2))
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # the placement decides
    result = measure(options.rounds, options.steps)
    table(result["rows"])
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
