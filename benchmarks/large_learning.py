"""Whether runs at larger sizes learn, and stay sound for long. Real runs of the short task of
`loop_vs_trl.py`.

    python benchmarks/large_learning.py [--parts curves hour] [--seeds 3] [--sizes 30m 125m]
                                        [--minutes 60] [--keep DIRECTORY] [--json]

Models have the shapes of `large.py`. Each begins with demonstrations, a part of which is wrong, so that it
samples right and wrong completions. Start models and finished runs of `curves` are kept.

curves  30 M: the reward of each schedule by step, over `--seeds` seeds. A seed chooses prompts and their
        order, alike for all. Reward per step does not depend on speed: other programs may run beside it.
hour    one run a size for `--minutes`, with a replica killed on the way: the checks of the quickstart on it,
        its figures, the faults that `millrace doctor` finds. `--keep` keeps the directories of these runs.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import kept_directory, parser_of, report, say, sized, table
from large import SIZES
from loop_vs_trl import CONFIG, GROUP_SIZE, GROUPS, OURS, Bench
from peers.start import TASKS, Task, make_start, write_prompts
from stored_runs import Kept, Spec, Store, interval, kept_step, plus_minus

TASK = TASKS["short"]
SIZE = "30m"
SCHEDULES = {
    "synchronous": '{ kind = "synchronous" }',
    "areal": '{ kind = "areal", eta = 2 }',
    "laminar": '{ kind = "laminar", staleness_max = 2, repack_interval_s = 0.5 }',
    "millrace": OURS["schedule"],
}
STEPS, FIFTHS = sized(30, 5), 5
SUPERVISED = {"30m": {"sft_steps": 120, "lr": 2e-3}, "125m": {"sft_steps": 60, "lr": 1.5e-3}}
"""Fewer demonstrations than a model of 0.8 M needs."""
LR, CURVE_LR = 3e-5, 1e-4
HELD_OUT, SAMPLES = sized(100, 4), 4
KILL_AT = sized(20, 1)

Figures = dict[str, Any]


def start_of(name: str) -> Path:
    settings = SUPERVISED[name]
    task: Task = replace(TASK, sft_steps=settings["sft_steps"])
    return make_start(task, kept_directory(), size=name, lr=settings["lr"], **SIZES[name].shape)


# ---------------------------------------------------------------- curves


def specs(seeds: range) -> list[Spec]:
    """All schedules of one seed, then the next seed."""
    ours = {name: {"schedule": text, "lr": CURVE_LR} for name, text in SCHEDULES.items()}
    return [Spec(TASK.name, name, seed, STEPS, SIZE, ours[name]) for seed in seeds for name in SCHEDULES]


def make(spec: Spec) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(TASK, spec.steps, Path(directory), start=start_of(SIZE))
        return [kept_step(event) for event in bench.train(spec.name, spec.seed, **spec.ours)]


def fifths(run: Kept) -> list[float]:
    """Mean reward of each fifth of the steps."""
    size = len(run.rewards) // FIFTHS
    return [sum(run.rewards[i * size : (i + 1) * size]) / size for i in range(FIFTHS)]


def curves(seeds: range) -> Figures:
    store, wanted = Store(kept_directory() / "large-learning", make), specs(seeds)
    store.complete(wanted)
    runs = store.all(wanted)
    rows, figures = {}, {}
    for name in SCHEDULES:
        own = {spec.seed: run for spec, run in runs.items() if spec.name == name}
        base = {spec.seed: run for spec, run in runs.items() if spec.name == "synchronous"}
        cells = zip(*(fifths(run) for run in own.values()), strict=True)
        below = [fifths(base[seed])[-1] - fifths(run)[-1] for seed, run in own.items()]
        rows[name] = {f"fifth {i + 1}": plus_minus(cell) for i, cell in enumerate(cells)} | {
            "staleness": sum(run.staleness_mean for run in own.values()) / len(own),
            "below synchronous": plus_minus(below),
        }
        figures[f"{name} last fifth"] = interval([fifths(run)[-1] for run in own.values()])[0]
        figures[f"{name} curve"] = mean_curve([run.rewards for run in own.values()])
    print(f"\n{SIZE}, short: mean reward, {len(seeds)} seeds, 95 % intervals")
    table(rows)
    return figures


def mean_curve(rewards: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*rewards, strict=True)]


# ---------------------------------------------------------------- an hour


def hour(name: str, minutes: float, seed: int, directory: Path) -> Figures:
    from millrace.compose import compose
    from millrace.compose.examine import examine
    from millrace.config.load import load
    from millrace.evaluation.evaluate import evaluate
    from millrace.evaluation.kept import keep
    from millrace.observe.terminal import Terminal
    from millrace.quickstart.checks import checks
    from millrace.quickstart.saboteur import Saboteur
    from millrace.run_directory import run_directory

    directory.mkdir(parents=True)
    rows = {part: directory / f"{part}.jsonl" for part in ("train", "held-out")}
    for number, path in enumerate(rows.values()):
        write_prompts(TASK, path, count=4000, seed=1000 * number + seed)
    (directory / "run.toml").write_text(config_of(name, rows["train"], seed))
    config = load(directory / "run.toml", [])
    held_out = config.task.model_copy(update={"path": str(rows["held-out"])})

    def accuracy(model: Path) -> Any:
        where = config.model.model_copy(update={"path": str(model)})
        asked = config.model_copy(update={"task": held_out, "model": where})
        return evaluate(asked, prompts=HELD_OUT, samples=SAMPLES)

    before = accuracy(Path(config.model.path))
    run, saboteur = run_directory.create("run", directory / "run"), Saboteur(at_version=KILL_AT)

    async def train() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(60 * minutes, stop.set)
        await compose.train(config, run, stop, saboteur, console=Terminal())

    asyncio.run(train())
    after = accuracy(run.model)
    steps = [json.loads(line) for line in run.events.read_text().splitlines() if '"step"' in line]
    steps = [event for event in steps if event["kind"] == "step"]
    for version, result in (0, before), (steps[-1]["version"], after):
        keep(run, version, result)
    found = examine(run)["findings"]
    for check in checks(before, after, run, saboteur):
        say(f"{name}: {'PASS' if check.holds else 'FAIL'}  {check.claim}: {check.detail}")
    say(f"{name}: findings {found}")
    return {
        f"{name} checks": sum(check.holds for check in checks(before, after, run, saboteur)),
        f"{name} findings": len(found),
        f"{name} steps": len(steps),
        f"{name} trained tokens": sum(event["trained_tokens"] for event in steps),
        f"{name} held-out accuracy": [before.sampled_accuracy, after.sampled_accuracy],
    }


def config_of(name: str, prompts: Path, seed: int) -> str:
    settings = {
        "start": start_of(name),
        "prompts": prompts,
        "steps": sized(100_000, 8),
        "seed": seed,
        "lr": LR,
        "max_tokens": TASK.max_tokens,
        "max_sequence_tokens": TASK.max_sequence_tokens,
        "extract": f"extract = '{TASK.extract}'",
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "device": "cpu",
        "dtype": "float32",
    }
    return CONFIG.format(**OURS | settings | SIZES[name].batch).replace("every = 1000", "every = 25")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", default=["curves", "hour"])
    parser.add_argument("--sizes", nargs="+", default=sized(list(SUPERVISED), ["30m"]), choices=SUPERVISED)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIRECTORY")
    options = parser.parse_args()
    figures: Figures = {}
    if "curves" in options.parts:
        figures |= curves(range(options.seed, options.seed + options.seeds))
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.sizes if "hour" in options.parts else ():
            figures |= hour(name, options.minutes, options.seed, (options.keep or Path(scratch)) / name)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
