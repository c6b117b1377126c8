"""Simulated against real: a small model trained here under three schedules, then each run simulated with the
costs and lengths that its own directory gives.

    python benchmarks/real_run.py [--json]    # three runs of about 20 s, alone on the machine
    python benchmarks/real_run.py --runs A B  # compare runs that are there

The task is the short one of `loop_vs_trl.py`: 8 prompts x 8, 36 tokens a completion, 0.8 M parameters, here
with two replicas of 32 slots. The start model is made once, in a minute or two.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import kept_directory, parser_of, sized, train
from fidelity import compare, largest_error
from peers.start import TASKS, make_start, write_prompts

SCHEDULES = {
    "synchronous": '{ kind = "synchronous" }',
    "areal": '{ kind = "areal", eta = 2 }',
    "laminar": '{ kind = "laminar", staleness_max = 2, repack_interval_s = 0.5 }',
}
SCHEDULES = sized(SCHEDULES, {"areal": SCHEDULES["areal"]})
STEPS = sized(60, 8)
CONFIG = """
steps = {steps}
model.path = "{start}"
batch = {{ prompts = 8, group_size = 8 }}
sampling.max_tokens = {task.max_tokens}
optimizer.lr = 1e-4
schedule = {schedule}
checkpoints.every = 1000

[rollout]
replicas = 2
slots = 32
max_sequence_tokens = {task.max_sequence_tokens}

[task]
kind = "file"
path = "{prompts}"

[reward]
kind = "exact"
extract = '{task.extract}'
"""

Table = dict[str, tuple[float, float]]
"""Quantity -> (real, simulated)."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, nargs="*", help="run directories to compare instead")
    arguments = parser.parse_args()
    tables = {str(run): compare(run) for run in arguments.runs or ()} or trained()
    for name, table in tables.items():
        print(f"\n{name:24} {'real':>10} {'simulated':>10}")
        for quantity, (real, simulated) in table.items():
            print(f"{quantity:24} {real:10.3f} {simulated:10.3f}")
        print(f"{'largest error':24} {largest_error(table):21.1%}")
    if arguments.json:
        print(json.dumps({"runs": tables, "real_run": worst(tables)}))


def trained() -> dict[str, Table]:
    """One real run under each schedule beside its simulation."""
    task = TASKS["short"]
    start = make_start(task, kept_directory())
    with tempfile.TemporaryDirectory() as scratch:
        prompts, tables = Path(scratch) / "prompts.jsonl", {}
        write_prompts(task, prompts, count=4000, seed=0)
        for name, schedule in SCHEDULES.items():
            train(
                CONFIG.format(steps=STEPS, start=start, task=task, schedule=schedule, prompts=prompts),
                Path(scratch) / name,
            )
            tables[name] = compare(Path(scratch) / name / "run")
        return tables


def worst(tables: dict[str, Table]) -> float:
    return max(largest_error(table) for table in tables.values())


if __name__ == "__main__":
    main()
