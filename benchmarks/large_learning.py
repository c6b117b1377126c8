"""Whether runs at larger sizes learn, and stay sound for long: the quickstart's task with larger models.

    python benchmarks/large_learning.py [--parts curves hour] [--seeds 3] [--sizes 30m 125m]
                                        [--minutes 60] [--keep DIRECTORY] [--json]

Models have the layers of `large.py` and the quickstart's vocabulary of characters. Each begins with
demonstrations, most of which are wrong, so that it samples right and wrong completions. Start models and
finished runs of `curves` are kept.

curves  30 M: the reward of each schedule by step, over `--seeds` seeds. A seed chooses prompts and their
        order, alike for all. Reward per step does not depend on speed: other programs may run beside it.
hour    one run a size for `--minutes`, with a replica killed on the way: the checks of the quickstart on it,
        its figures, the faults that `millrace doctor` finds. `--keep` keeps the directories of these runs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from common import kept_directory, parser_of, report, say, sized, table, train
from large import SIZES
from stored_runs import Kept, Spec, Store, interval, kept_step, plus_minus

SIZE, TASK = "30m", "words"
QUICKSTART = Path(str(files("millrace.quickstart") / "quickstart.toml"))
BOUND = ["schedule.staleness_max=2", "schedule.repack_interval_s=0.5"]
SCHEDULES = {
    "synchronous": ["schedule.kind=synchronous"],
    "areal": ["schedule.kind=areal", "schedule.eta=2"],
    "laminar": ["schedule.kind=laminar", *BOUND],
    "millrace": ["schedule.kind=millrace", *BOUND],
}
STEPS, FIFTHS = sized(40, 5), 5
EVALUATED, SAMPLES = sized(200, 4), 4
KILL_AT = sized(20, 1)


@dataclass(frozen=True)
class Learning:
    """`sft_steps`, `sft_lr`: of the demonstrations. `lr`: of the run."""

    sft_steps: int
    sft_lr: float
    lr: float


LEARNING = {"30m": Learning(sized(100, 2), 2e-3, 5e-5), "125m": Learning(sized(60, 2), 1.5e-3, 3e-5)}

Figures = dict[str, Any]


def changes(name: str, seed: int, steps: int, schedule: str, every: int) -> list[str]:
    """What differs from the quickstart's configuration, as "key=value"."""
    own = {"steps": steps, "seed": seed, "optimizer.lr": LEARNING[name].lr, "checkpoints.every": every}
    keys = own | {"model.path": start_of(name)}
    return [*(f"{key}={value}" for key, value in keys.items()), *SCHEDULES[schedule]]


def start_of(name: str) -> Path:
    """The model after its demonstrations, made once."""
    from millrace.config.load import load
    from millrace.observe.terminal import Terminal
    from millrace.quickstart.start_model import make_start_model

    directory = kept_directory() / f"words-{name}"
    if not (directory / "start" / "model.safetensors").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        how, shape = LEARNING[name], dict(SIZES[name].shape)
        del shape["vocab_size"]
        shape |= {"hidden_size": shape.pop("hidden"), "num_hidden_layers": shape.pop("layers")}
        config = load(QUICKSTART, [f"model.path={directory / 'start'}"])
        console = Terminal(stderr=True)
        make_start_model(config, directory, console, steps=how.sft_steps, lr=how.sft_lr, **shape)
    return directory / "start"


# ---------------------------------------------------------------- curves


def specs(seeds: range) -> list[Spec]:
    """All schedules of one seed, then the next seed."""
    return [
        Spec(TASK, name, seed, STEPS, SIZE, {"schedule": text, "lr": LEARNING[SIZE].lr})
        for seed in seeds
        for name, text in SCHEDULES.items()
    ]


def make(spec: Spec) -> list[dict[str, Any]]:
    sets = changes(SIZE, spec.seed, spec.steps, spec.name, every=1000)
    with tempfile.TemporaryDirectory() as directory:
        events = train(QUICKSTART.read_text(), Path(directory) / "run", sets=sets)
    return [kept_step(event) for event in events if event["kind"] == "step"]


def fifths(run: Kept) -> list[float]:
    """Mean reward of each fifth of the steps."""
    size = len(run.rewards) // FIFTHS
    return [sum(run.rewards[i * size : (i + 1) * size]) / size for i in range(FIFTHS)]


def curves(seeds: range) -> Figures:
    store, wanted = Store(kept_directory() / "large-learning", make), specs(seeds)
    store.complete(wanted)
    runs = store.all(wanted)
    base = {spec.seed: run for spec, run in runs.items() if spec.name == "synchronous"}
    rows, figures = {}, {}
    for name in SCHEDULES:
        own = {spec.seed: run for spec, run in runs.items() if spec.name == name}
        cells = zip(*(fifths(run) for run in own.values()), strict=True)
        below = [fifths(base[seed])[-1] - fifths(run)[-1] for seed, run in own.items()]
        rows[name] = {f"fifth {i + 1}": plus_minus(cell) for i, cell in enumerate(cells)} | {
            "staleness": sum(run.staleness_mean for run in own.values()) / len(own),
            "below synchronous": plus_minus(below),
        }
        figures[f"{name} last fifth"] = interval([fifths(run)[-1] for run in own.values()])[0]
        figures[f"{name} below synchronous"] = interval(below)[0]
    print(f"\n{SIZE}, {TASK}: mean reward, {len(seeds)} seeds, 95 % intervals")
    table(rows)
    return figures


# ---------------------------------------------------------------- an hour


def hour(name: str, minutes: float, seed: int, directory: Path) -> Figures:
    from millrace.config.load import load
    from millrace.diagnose.examine import examine
    from millrace.evaluation.evaluate import HELD_OUT_SEED, evaluate, held_out_config
    from millrace.evaluation.evaluated_runs import keep
    from millrace.observe.sinks.log_files import opened
    from millrace.observe.terminal import Terminal
    from millrace.quickstart.checks import checks
    from millrace.quickstart.saboteur import Saboteur
    from millrace.run import compose
    from millrace.run_directory import run_directory

    directory.mkdir(parents=True)
    config = load(QUICKSTART, changes(name, seed, sized(100_000, 8), "millrace", every=20))

    def accuracy(model: Path) -> Any:
        held_out = held_out_config(config, model, seed=0, data_seed=HELD_OUT_SEED)
        return evaluate(held_out, prompts=EVALUATED, samples=SAMPLES)

    async def body() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(60 * minutes, stop.set)
        await compose.train(config, run, stop, saboteur, console=Terminal())

    before = accuracy(Path(config.model.path))
    run, saboteur = run_directory.create("run", directory / "run"), Saboteur(at_version=KILL_AT)
    asyncio.run(body())
    after = accuracy(run.model)
    with opened(run.events) as parts:
        events = [json.loads(line) for _, lines in parts for line in lines]
    steps = [event for event in events if event["kind"] == "step"]
    for version, result in (0, before), (steps[-1]["version"], after):
        keep(run, version, result)
    claims, found = checks(before, after, run, saboteur), examine(run)["findings"]
    for check in claims:
        say(f"{name}: {'PASS' if check.holds else 'FAIL'}  {check.claim}: {check.detail}")
    say(f"{name}: findings {found}")
    return {
        f"{name} checks": sum(check.holds for check in claims),
        f"{name} findings": len(found),
        f"{name} steps": len(steps),
        f"{name} trained tokens": sum(event["trained_tokens"] for event in steps),
        f"{name} greedy before": before.greedy_accuracy,
        f"{name} greedy after": after.greedy_accuracy,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", default=["curves", "hour"])
    parser.add_argument("--sizes", nargs="+", default=sized(list(LEARNING), ["30m"]), choices=LEARNING)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--seed", type=int, default=1, help="the first one")
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
