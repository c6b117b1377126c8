"""What a schedule costs: the same prompts, seeds and steps under each, with long-tailed completions.

    python benchmarks/schedules.py [--rounds 3] [--replicas 2] [--steps 16] [--json]

The task counts down from n, log-normal with p99 = 10 x median, so a batch has a few completions that are many
times as long as the others. Every schedule trains the same groups, to the last one: the rate is of
all trained tokens over the time from the first lease to the last step. Replicas and trainer share the
machine's cores, so a schedule wins by what it does not leave idle.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import kept_directory, median, medians, parser_of, report, say, sized, table, train
from peers.start import TASKS, make_start, write_prompts

SCHEDULES = {
    "synchronous": 'kind = "synchronous"',
    "llamarl": 'kind = "llamarl"',
    "areal": 'kind = "areal"',
    "laminar_no_repack": 'kind = "laminar", repack = false',
    "laminar": 'kind = "laminar", repack_interval_s = 0.2',
    "millrace": 'kind = "millrace", repack_interval_s = 0.2',
}
TASK = TASKS["uneven"]

CONFIG = """
steps = {steps}
seed = {seed}
model.path = "{start}"
batch = {{ prompts = 8, group_size = 8 }}
sampling.max_tokens = {max_tokens}
optimizer.lr = 1e-5
schedule = {{ {schedule} }}
checkpoints.every = 1000

[rollout]
replicas = {replicas}
slots = {slots}
max_sequence_tokens = {max_sequence_tokens}
report_interval_s = 0.05

[task]
kind = "file"
path = "{prompts}"

[reward]
kind = "exact"
"""


def run(
    schedule: str, directory: Path, *, prompts: Path, replicas: int, steps: int, seed: int
) -> dict[str, Any]:
    config = CONFIG.format(
        steps=steps,
        seed=seed,
        start=make_start(TASK, kept_directory()),
        max_tokens=TASK.max_tokens,
        max_sequence_tokens=TASK.max_sequence_tokens,
        schedule=SCHEDULES[schedule],
        replicas=replicas,
        slots=64 // replicas,
        prompts=prompts,
    )
    events = train(config, directory)
    trained = [event for event in events if event["kind"] == "step"]
    began_s = next(event["time_s"] for event in events if event["kind"] == "leased")
    wall_s = trained[-1]["time_s"] - began_s
    tokens = sum(step["trained_tokens"] for step in trained)
    return {
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "tokens": tokens,
        "trainer_idle": sum(step["wait_s"] for step in trained) / wall_s,
        "staleness_mean": sum(step["staleness_mean"] for step in trained) / len(trained),
        "moved": sum(event["kind"] == "moved" and bool(event["trajectories"]) for event in events),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=sized(16, 2))
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEDULES}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            prompts = Path(name) / "prompts.jsonl"
            write_prompts(TASK, prompts, count=4000, seed=number)
            shape = {"prompts": prompts, "replicas": options.replicas, "steps": options.steps, "seed": number}
            for schedule, rounds in found.items():
                rounds.append(run(schedule, Path(name) / schedule, **shape))
                say(f"{number + 1}/{options.rounds} {schedule}: {rounds[-1]}")
    table({name: medians(rounds) for name, rounds in found.items()})
    report(_ratios(found), as_json=options.json)


def _ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians over rounds of the ratios within a round, whose prompts are the same."""

    def over(one: str, other: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return median([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs])

    return {
        "laminar_over_synchronous": over("laminar", "synchronous"),
        "repack_gain": over("laminar", "laminar_no_repack"),
        "millrace_over_laminar": over("millrace", "laminar"),
        "areal_over_synchronous": over("areal", "synchronous"),
        "llamarl_over_synchronous": over("llamarl", "synchronous"),
    }


if __name__ == "__main__":
    main()
