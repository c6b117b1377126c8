"""Draft tokens in Millrace's engine: the same tokens with and without them, and the time of both.

    python benchmarks/drafts.py [--tasks uneven short] [--rounds 3] [--steps 24] [--json]

The rows of a task repeat over epochs, each time in groups with other noise. Both engines sample the same
batches in turns. The tail of a batch begins when at most `ROWS_MAX` of its trajectories run. Until then no
drafts are made, so both tails have the same tokens. Times are CPU seconds, and begin with the second epoch.
The first of `--tasks` gives the main figures.

tail_speedup    CPU seconds of the tails without drafts over those with drafts
batch_speedup   the same of whole batches
few_speedup     the same with `ROWS_MAX` slots: never more trajectories run
loop_gain       tokens per second of whole runs with drafts over those without, in turns, median of rounds
drafter_gain    `tail_speedup` of the trained drafter (`drafter.py`, on the first of `--tasks`)
mismatches      trajectories whose tokens or log-probs differ, bit for bit, with `rollout.exact`: has to be 0
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import drafter
import torch
from common import kept_directory, median, parser_of, report, say, sized, table, train
from drafts_played import GROUP, PROMPTS, ROWS, ROWS_MAX, Played, batches, play
from peers.start import TASKS, Task, make_start, write_prompts
from transformers import AutoTokenizer

from millrace.engines.own.load_engine import load_engine

CONFIG = """
steps = {steps}
seed = {seed}
model.path = "{start}"
batch = {{ prompts = {prompts}, group_size = {group} }}
sampling.max_tokens = {max_tokens}
optimizer.lr = 1e-5
schedule.kind = "synchronous"
checkpoints.every = 1000

[rollout]
replicas = 1
slots = {slots}
max_sequence_tokens = {max_sequence_tokens}
{drafts}

[task]
kind = "file"
path = "{rows}"

[reward]
kind = "exact"
{extract}
"""
DRAFTS = f'drafts = "earlier"\ndraft_rows_max = {ROWS_MAX}'


def compare(task: Task, *, seed: int, slots: int, exact: bool = False) -> dict[str, float]:
    """Both engines on the same batches, in turns."""
    start = make_start(task, kept_directory())
    options = {"slots": slots, "max_sequence_tokens": task.max_sequence_tokens, "draft_rows_max": ROWS_MAX}
    engines = {
        name: load_engine(str(start), device="cpu", exact=exact, drafts=drafts, **options)
        for name, drafts in (("without", None), ("with", "earlier"))
    }
    played = {name: Played() for name in engines}
    for epoch, works in batches(task, AutoTokenizer.from_pretrained(start), seed=seed):
        for name, engine in engines.items():
            play(engine, works, played[name], timed=epoch > 0)
    one, other, load = played["without"], played["with"], engines["with"].load()
    pairs = [(one.columns[tid], columns) for tid, columns in other.columns.items()]
    return {
        "tail_speedup": one.tail_s / other.tail_s,
        "batch_speedup": one.batch_s / other.batch_s,
        "tail_share": one.tail_s / one.batch_s,
        "drafted": load.drafted_tokens,
        "right": load.accepted_tokens / max(1, load.drafted_tokens),
        "steps_saved": 1 - load.steps_since_swap / engines["without"].load().steps_since_swap,
        "other_tokens": sum(a[0] != b[0] for a, b in pairs),
        "mismatches": sum(a != b for a, b in pairs),
    }


def loop(task: Task, directory: Path, *, rows: Path, drafts: bool, steps: int, seed: int) -> dict[str, float]:
    """A whole run, in which the rows repeat."""
    config = CONFIG.format(
        steps=steps,
        seed=seed,
        start=make_start(task, kept_directory()),
        prompts=PROMPTS,
        group=GROUP,
        max_tokens=task.max_tokens,
        slots=PROMPTS * GROUP,
        max_sequence_tokens=task.max_sequence_tokens,
        drafts=DRAFTS if drafts else "",
        rows=rows,
        extract="" if task.extract is None else f"extract = '{task.extract}'",
    )
    events = train(config, directory)
    trained = [event for event in events if event["kind"] == "step"]
    began_s = next(event["time_s"] for event in events if event["kind"] == "leased")
    load = [event for event in events if event["kind"] == "report"][-1]
    return {
        "tokens_per_s": sum(step["trained_tokens"] for step in trained) / (trained[-1]["time_s"] - began_s),
        "busy_s": load["busy_s"],
        "right": load["accepted_tokens"] / max(1, load["drafted_tokens"]),
    }


def loops(task: Task, *, rounds: int, steps: int) -> dict[str, float]:
    """The order of the two changes from round to round."""
    gains, busy = [], []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            rows = Path(name) / "rows.jsonl"
            write_prompts(task, rows, count=ROWS, seed=number)
            found = {}
            for drafts in (False, True) if number % 2 else (True, False):
                shape = {"rows": rows, "drafts": drafts, "steps": steps, "seed": number}
                found[drafts] = loop(task, Path(name) / f"drafts-{drafts}", **shape)
        say(f"run {number + 1} of {rounds}: {found}")
        gains.append(found[True]["tokens_per_s"] / found[False]["tokens_per_s"])
        busy.append(found[False]["busy_s"] / found[True]["busy_s"])
    return {"loop_gain": median(gains), "replica_gain": median(busy)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=sized(["uneven", "short"], ["short"]))
    parser.add_argument("--rounds", type=int, default=sized(3, 1), help="of whole runs; 0: none")
    parser.add_argument("--steps", type=int, default=sized(24, 2))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name in options.tasks:
        task, many = TASKS[name], PROMPTS * GROUP
        found[f"{name}, {many} slots"] = compare(task, seed=1, slots=many)
        found[f"{name}, {ROWS_MAX} slots"] = compare(task, seed=1, slots=ROWS_MAX)
        found[f"{name}, exact"] = compare(task, seed=2, slots=many, exact=True)
        say(f"{name}: {found}")
    table(found)
    first = options.tasks[0]
    result = {
        "tail_speedup": found[f"{first}, {PROMPTS * GROUP} slots"]["tail_speedup"],
        "batch_speedup": found[f"{first}, {PROMPTS * GROUP} slots"]["batch_speedup"],
        "few_speedup": found[f"{first}, {ROWS_MAX} slots"]["batch_speedup"],
        "mismatches": sum(found[f"{name}, exact"]["mismatches"] for name in options.tasks),
        "rows": found,
    }
    if options.rounds:
        result |= loops(TASKS[first], rounds=options.rounds, steps=options.steps)
    trained = drafter.measured(TASKS[first], steps=drafter.STEPS)
    result["drafter"] = trained
    result["drafter_gain"] = trained["drafter_gain"]
    result["mismatches"] += trained["mismatches"]
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
