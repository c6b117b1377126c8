"""Objectives by staleness: where training on old tokens hurts, and which correction helps.

    python benchmarks/staleness.py --json                        # 3 seeds, every objective and staleness
    python benchmarks/staleness.py --seeds 1 --ages 0,16         # a part; a later call completes it
    python benchmarks/staleness.py --for-s 240                   # begins no run after that time

The quickstart's task from its start model, with engine, rewards and trainer of a real run in one process
(`one_process.py`). So every token has the same staleness, after the first steps, and a repeat is the same
run. Every run has as many steps, of as many trajectories, at one learning rate. What counts is the final
model: its mean reward on held-out prompts, four samples each. A run has collapsed where that is below half of
the best fifth of its training rewards. ESS is that of the second half of the steps. Speed does not matter:
other programs may run beside it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common import QUICK, kept_directory, parser_of, report, sized, table
from peers.start import TASKS, make_start
from stored_runs import Kept, Spec, Store, interval, plus_minus

from millrace.config.load import load
from millrace.config.schema import Config

AGES = (0, 2, 8, 16)
STEPS = sized(64, 3)
HELD_OUT, SAMPLES = sized(150, 4), 4
OBJECTIVES = {
    "none": '{ kind = "grpo", clip = "none", correction = "none" }',
    "bypass": '{ kind = "bypass" }',
    "tis": '{ kind = "grpo" }',
    "sequence tis": '{ kind = "sequence_tis" }',
    "icepop": '{ kind = "icepop" }',
    "decoupled": '{ kind = "decoupled" }',
    "aipo": '{ kind = "aipo" }',
    "cispo": '{ kind = "cispo" }',
    "gspo": '{ kind = "gspo", anchor = "behavior", correction = "none" }',
    "m2po": '{ kind = "m2po" }',
}
"""Name -> `algorithm`. With one optimizer step a batch a clip to the proximal policy never acts. So PPO's
clip is `bypass`, whose ratio is to the policy that sampled, and GSPO's ratio is to that policy too."""

CONFIG = """
steps = {steps}
seed = {seed}
allow = ["uncorrected"]
algorithm = {algorithm}
model.path = "{start}"
batch = {{ prompts = 8, group_size = 8 }}
sampling.max_tokens = 16
optimizer = {{ lr = {lr}, warmup_steps = 5 }}

[task]
kind = "gym"
name = "spell_backward"
options = {{ min_word_len = 3, max_word_len = 8 }}
template = "{{metadata[word]}}>"

[reward]
kind = "gym"

[rollout]
replicas = 1
slots = 64
max_sequence_tokens = 32
"""

Cells = dict[tuple[str, int], list[Kept]]
"""(objective, staleness) -> a run for each seed."""


def specs(objectives: Iterable[str], ages: Sequence[int], seeds: range, steps: int, lr: float) -> list[Spec]:
    """All objectives and ages of one seed, then the next seed."""
    return [
        Spec(
            "quickstart",
            name,
            seed,
            steps,
            f"lr-{lr:g}-staleness-{age}",
            {"algorithm": OBJECTIVES[name], "age": age, "lr": lr},
        )
        for seed in seeds
        for name in objectives
        for age in ages
    ]


@cache
def start_model() -> Path:
    """The quickstart's, made once; with `--quick` a random one."""
    from millrace.observe.terminal import Terminal
    from millrace.quickstart.start_model import make_start_model

    directory = kept_directory() / "quickstart"
    if QUICK:
        return make_start(TASKS["short"], directory)
    if not (directory / "start" / "model.safetensors").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        make_start_model(_config(directory / "start", OBJECTIVES["tis"]), directory, Terminal())
    return directory / "start"


def _config(start: Path, algorithm: str, seed: int = 0, steps: int = 1, lr: float = 1e-4) -> Config:
    text = CONFIG.format(seed=seed, steps=steps, start=start, algorithm=algorithm, lr=lr)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "run.toml").write_text(text)
        return load(Path(directory) / "run.toml")


def make(spec: Spec) -> list[dict[str, Any]]:
    """Of each step its reward and ESS; of the last one also the reward of the final model."""
    from one_process import OneProcess

    config = _config(start_model(), spec.ours["algorithm"], spec.seed, spec.steps, spec.ours["lr"])
    steps, reward = OneProcess(config, spec.ours["age"]).run(held_out=HELD_OUT, samples=SAMPLES)
    kept = [{name: step[name] for name in ("reward", "ess", "silenced")} for step in steps]
    kept[-1]["held_out"] = reward
    return kept


def final(run: Kept) -> float:
    return float(run.steps[-1]["held_out"])


def collapsed(run: Kept) -> bool:
    rewards, size = run.rewards, max(1, len(run.rewards) // 5)
    fifths = [sum(rewards[i : i + size]) / size for i in range(0, len(rewards) - size + 1, size)]
    return final(run) < max(fifths) / 2


def ess(run: Kept) -> float:
    half = run.steps[len(run.steps) // 2 :]
    return float(sum(step["ess"] for step in half) / len(half))


def tell(cells: Cells, ages: Sequence[int]) -> dict[str, float | None]:
    """Print the tables; returns the figures by name."""
    names = list(dict.fromkeys(name for name, _ in cells))
    rewards, weights, figures = {}, {}, dict[str, float | None]()
    for name in names:
        own = {age: cells[name, age] for age in ages if (name, age) in cells}
        rewards[name] = {f"staleness {age}": _level(runs) for age, runs in own.items()}
        weights[name] = {f"staleness {age}": plus_minus([ess(r) for r in runs]) for age, runs in own.items()}
        for age, runs in own.items():
            mean, half = interval([final(run) for run in runs])
            figures |= {f"{name} {age}": mean, f"{name} {age} half width": half}
            figures[f"{name} {age} collapsed"] = sum(map(collapsed, runs))
            figures[f"{name} {age} ess"] = sum(map(ess, runs)) / len(runs)
            figures[f"{name} {age} seeds"] = len(runs)
    print("\nreward of the final model, 95 % intervals; in brackets runs that collapsed, of all")
    table(rewards)
    print("\neffective sample size of a batch, as a share")
    table(weights)
    return figures


def _level(runs: list[Kept]) -> str:
    return f"{plus_minus([final(run) for run in runs], 2)} ({sum(map(collapsed, runs))}/{len(runs)})"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ages", default=sized(",".join(map(str, AGES)), "0,2"))
    parser.add_argument("--objectives", default=sized(",".join(OBJECTIVES), "none,tis"))
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--for-s", type=float, default=None, help="begin no run after so many seconds")
    parser.add_argument("--store", type=Path, default=None, help="directory of finished runs")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    ages = [int(age) for age in options.ages.split(",")]
    wanted = specs(options.objectives.split(","), ages, seeds, STEPS, options.lr)
    store = Store(options.store or kept_directory() / "staleness", make)
    began = time.monotonic()
    for spec in wanted:
        if options.for_s is None or time.monotonic() - began < options.for_s:
            store.complete([spec])
    cells: Cells = {}
    for spec, run in store.all(wanted).items():
        cells.setdefault((spec.name, spec.ours["age"]), []).append(run)
    report(tell(cells, ages), as_json=options.json)


if __name__ == "__main__":
    main()
