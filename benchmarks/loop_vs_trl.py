"""The whole loop against TRL's GRPOTrainer and AsyncGRPOTrainer: generate, score, train, hand out weights.

    python benchmarks/loop_vs_trl.py [--rounds 3] [--quick] [--tasks short,uneven] [--json]

Same start model (0.8 M parameters), prompts in the same order, 8 prompts x 8 samples a step, learning rate
1e-4, length limit, reward and staleness bound (2, the asynchronous ones); float32, one thread per process.
TRL runs in a virtual environment of its own; `peers/trl/async_grpo.py` says what its asynchronous
trainer needs on a CPU. Rounds are interleaved. Start-up is left out for all: time counts from the end
of the first step. The reward is compared as a mean over the last steps, since each is of 64 samples.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import (
    QUICK,
    cache_directory,
    kept_directory,
    median,
    parser_of,
    report,
    require,
    run_logged,
    say,
    sized,
    table,
    train,
)
from peers.start import TASKS, Task, make_start, write_prompts
from peers.trl.venv import present, python_with_trl

BENCHMARKS = Path(__file__).parent
GROUPS = GROUP_SIZE = 8
LR, STALENESS_MAX = 1e-4, 2
WINDOW = 10  # steps over which rewards are averaged
SCRIPTS = {"trl_grpo": "grpo.py", "trl_async": "async_grpo.py"}
CONTESTANTS = ("millrace", *SCRIPTS)
STEPS = {"short": sized(120, 12), "uneven": sized(72, 12)}
GAIN = 0.10  # above the round's first rewards: what time to reward is measured to

CONFIG = """
steps = {steps}
seed = {seed}
model = {{ path = "{start}", recompute = {recompute}, device = "{device}", dtype = "{dtype}" }}
algorithm.kl = {kl}
batch = {{ prompts = {groups}, group_size = {group_size}, token_budget = {token_budget} }}
sampling.max_tokens = {max_tokens}
optimizer = {{ lr = {lr}, betas = [0.9, 0.999] }}
schedule = {schedule}
checkpoints.every = 1000

[rollout]
replicas = 1
slots = {slots}
max_sequence_tokens = {max_sequence_tokens}
report_interval_s = 0.1

[task]
kind = "file"
path = "{prompts}"

[reward]
kind = "exact"
{extract}
"""


@dataclass(frozen=True)
class Step:
    t_s: float
    tokens: float  # trained completion tokens
    reward: float


Curve = list[Step]

SCHEDULE = f'{{ kind = "millrace", staleness_max = {STALENESS_MAX}, repack_interval_s = 0.5 }}'
OURS = {"schedule": SCHEDULE, "slots": 128, "token_budget": 8192, "recompute": "false", "kl": 0.0}
"""What `CONFIG` has and no peer knows."""


# ---------------------------------------------------------------- one run


def run_peer(
    name: str, job: dict[str, Any], work: Path, *, threads: int, python: Path | None = None
) -> Curve:
    """A job (`peers/trl/job.py`) by one of `SCRIPTS` in a new directory. `python`: one that has TRL."""
    work.mkdir()
    (work / "job.json").write_text(json.dumps(job | {"out": str(work / "steps.jsonl"), "threads": threads}))
    python = python or python_with_trl(cache_directory())
    command = [python, BENCHMARKS / "peers" / "trl" / SCRIPTS[name], work / "job.json"]
    run_logged(command, work / "log", threads=threads)
    with (work / "steps.jsonl").open() as lines:
        steps = [json.loads(line) for line in lines]
    return [Step(step["t"], step["tokens"], step["reward"]) for step in steps]


class Bench:
    """One task's files, and the three ways to run it. `start`: another model. `python`: one that has TRL."""

    def __init__(
        self,
        task: Task,
        steps: int,
        directory: Path,
        *,
        start: Path | None = None,
        python: Path | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        self.task, self.steps, self.directory = task, steps, directory
        self._start = start or make_start(task, kept_directory())
        self._python, self._where = python, {"device": device, "dtype": dtype}

    def run(self, contestant: str, seed: int, *, threads: int | None = 1) -> Curve:
        """`threads`: of each process. None: what the contestant chooses."""
        if contestant == "millrace":
            steps = self.train(contestant, seed, threads=threads)
            return [Step(e["time_s"], e["trained_tokens"], e["reward_mean"]) for e in steps]
        return self._peer(contestant, self._rows(seed), seed, threads or 1)

    def train(self, name: str, seed: int, *, threads: int | None = 1, **ours: Any) -> list[dict[str, Any]]:
        """The `step` events of a run of ours; `ours` changes what `OURS` holds."""
        extract = f"extract = '{self.task.extract}'" if self.task.extract else ""
        shape = self._shape(self._rows(seed), seed) | OURS | ours | {"extract": extract}
        directory = self.directory / f"{self.task.name}-{name}-{seed}"
        events = train(CONFIG.format(**shape), directory, threads=threads)
        return [event for event in events if event["kind"] == "step"]

    def _rows(self, seed: int) -> Path:
        rows = self.directory / f"{self.task.name}-{seed}.jsonl"
        if not rows.exists():
            write_prompts(self.task, rows, count=4000, seed=seed)
        return rows

    def _peer(self, name: str, rows: Path, seed: int, threads: int) -> Curve:
        work = self.directory / f"{self.task.name}-{name}-{seed}-{threads}"
        job = self._shape(self._in_our_order(rows, seed), seed)
        return run_peer(name, job, work, threads=threads, python=self._python)

    def _shape(self, rows: Path, seed: int) -> dict[str, Any]:
        return {
            "start": str(self._start),
            "prompts": str(rows),
            "steps": self.steps,
            "seed": seed,
            "lr": LR,
            "temperature": 1.0,
            "max_tokens": self.task.max_tokens,
            "max_sequence_tokens": self.task.max_sequence_tokens,
            "staleness_max": STALENESS_MAX,
            "extract": self.task.extract,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            **self._where,
        }

    def _in_our_order(self, rows: Path, seed: int) -> Path:
        """The rows as our shuffle draws them, for peers that go through them from first to last."""
        from millrace.tasks.order import row_of

        ordered, lines = rows.with_suffix(".ordered"), rows.read_bytes().splitlines()
        if not ordered.exists():
            ordered.write_bytes(b"\n".join(lines[row_of(i, len(lines), seed)] for i in range(len(lines))))
        return ordered


# ---------------------------------------------------------------- what is compared


def tokens_per_s(curve: Curve) -> float:
    """Trained tokens per second after the first fifth of the steps: queues and caches have filled."""
    first = max(1, len(curve) // 5)
    return sum(step.tokens for step in curve[first:]) / (curve[-1].t_s - curve[first - 1].t_s)


def smoothed(curve: Curve) -> list[float]:
    return [sum(s.reward for s in curve[i : i + WINDOW]) / WINDOW for i in range(len(curve) - WINDOW + 1)]


def seconds_to(curve: Curve, reward: float) -> float | None:
    """From the end of the first step; None: not reached."""
    means = smoothed(curve)
    for i, mean in enumerate(means):
        if mean >= reward:
            return curve[i + WINDOW - 1].t_s - curve[0].t_s
    return None


def summary(curve: Curve) -> dict[str, Any]:
    means = smoothed(curve)
    return {
        "steps": len(curve),
        "s_per_step": median([b.t_s - a.t_s for a, b in pairwise(curve)]),
        "tokens_per_s": tokens_per_s(curve),
        "tokens_per_step": sum(step.tokens for step in curve) / len(curve),
        "reward_first": means[0],
        "reward_last": means[-1],
    }


def time_ratio(curves: dict[str, Curve]) -> float | None:
    """Seconds to the reward of the better peer over ours. A peer that does not reach it counts with the
    time that it ran; None: we do not reach it."""
    target = sum(smoothed(curve)[0] for curve in curves.values()) / len(curves) + GAIN
    taken = {name: seconds_to(curve, target) for name, curve in curves.items()}
    say(f"  seconds to reward {target:.3f}: {taken}")
    ours = taken.pop("millrace")
    if ours is None:
        return None
    peers = [taken[name] or curves[name][-1].t_s - curves[name][0].t_s for name in taken]
    return min(peers) / ours


def compare(task: Task, rounds: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs, a table of medians, and the ratios of one task."""
    found: list[dict[str, Curve]] = []
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(task, steps, Path(directory))
        for number in range(rounds):
            curves = {}
            for contestant in CONTESTANTS:
                curves[contestant] = bench.run(contestant, seed + number)
                say(f"{task.name} {number + 1}/{rounds} {contestant}: {_line(summary(curves[contestant]))}")
            found.append(curves)
    rows = {name: _medians([summary(curves[name]) for curves in found]) for name in CONTESTANTS}
    print(f"\n{task.name}: medians of {rounds} rounds")
    table(rows)
    _show_curves(found)
    rate = {name: row["tokens_per_s"] for name, row in rows.items()}
    times = [ratio for curves in found if (ratio := time_ratio(curves)) is not None]
    return {
        "ratio_trained_tokens_per_s": rate["millrace"] / rate["trl_grpo"],
        "ratio_over_trl_async": rate["millrace"] / rate["trl_async"],
        "ratio_time_to_reward": median(times) if 2 * len(times) > rounds else None,
        **{f"{name}_tokens_per_s": value for name, value in rate.items()},
    }


def _medians(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: median([one[key] for one in summaries]) for key in summaries[0]}


def _line(values: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in values.items())


def _show_curves(found: list[dict[str, Curve]]) -> None:
    """Mean reward by fifth of the steps, over all rounds: equal algorithms, equal curves."""
    rows = {}
    for name in CONTESTANTS:
        curves = [curves[name] for curves in found]
        fifth = max(1, len(curves[0]) // 5)
        means = [
            sum(s.reward for curve in curves for s in curve[i * fifth : (i + 1) * fifth])
            / (fifth * len(curves))
            for i in range(5)
        ]
        rows[name] = {f"fifth {i + 1}": round(mean, 3) for i, mean in enumerate(means)}
    print("reward")
    table(rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--tasks", default=sized("short,uneven", "short"))
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next is one more")
    options = parser.parse_args()
    require(not QUICK or present(cache_directory()), "TRL is not installed")
    results = {}
    for name in options.tasks.split(","):
        results[name] = compare(TASKS[name], options.rounds, STEPS[name], options.seed)
    first = next(iter(results.values()))
    more = {f"{name}_{key}": v for name, values in results.items() for key, v in values.items()}
    report(first | more, as_json=options.json)


if __name__ == "__main__":
    main()
