"""The simulator beside what is known: real runs made here, and published numbers of clusters.

    python benchmarks/fidelity.py [--json]             # published tables 3 to 5 minutes, real runs 2
    python benchmarks/fidelity.py --only real_run      # three runs of about 20 s, alone on the machine
    python benchmarks/fidelity.py --only verl,laminar  # two of the published tables
    python benchmarks/fidelity.py --runs A B           # compare runs that are there

real_run   a small model trained under three schedules, then each run simulated with the costs and lengths
           that its own directory gives. The task is the short one of `loop_vs_trl.py`: 8 prompts x 8, 36
           tokens a completion, 0.8 M parameters, here with two replicas of 32 slots
others     what verl, AReaL, Laminar and LlamaRL published (`published/`), and what is predicted for it

`--json` gives every row, and the largest relative error of each source over the rows that calibrate nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import kept_directory, parser_of, report, sized, train
from peers.start import TASKS, make_start, write_prompts
from published import areal, laminar, llamarl, verl
from published.row import Row
from published.row import largest_error as row_error

from millrace_sim.calibrate.achieved import Achieved
from millrace_sim.calibrate.learn import calibrate
from millrace_sim.simulation import simulate

FRACTIONS = ("trainer_idle", "replica_idle")
PUBLISHED = {"verl": verl, "areal": areal, "laminar": laminar, "llamarl": llamarl}
REAL_RUN = "real_run"

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
    parser.add_argument("--only", default=",".join([*PUBLISHED, REAL_RUN]), help="sources, with commas")
    parser.add_argument("--runs", type=Path, nargs="*", help="run directories to compare instead")
    options = parser.parse_args()
    sources = [] if options.runs else options.only.split(",")
    result: dict[str, Any] = {"rows": [], "runs": {}}
    for source in sources:
        if source in PUBLISHED:
            rows = PUBLISHED[source].rows()
            show_published(rows)
            result["rows"] += [{**vars(row), "error": row.error} for row in rows]
            result[source] = row_error(rows)
    if options.runs or REAL_RUN in sources:
        result["runs"] = {str(run): compare(run) for run in options.runs or ()} or trained()
        show_runs(result["runs"])
        result[REAL_RUN] = max(largest_error(table) for table in result["runs"].values())
    report(result, as_json=options.json)


def show_published(rows: list[Row]) -> None:
    for row in rows:
        mark = "  (calibrates)" if row.calibrates else ""
        values = f"{row.published:8.3g} {row.predicted:8.3g} {row.unit:2} {row.error:+5.0%}"
        print(f"{row.what:58} {values}{mark}")


def show_runs(tables: dict[str, Table]) -> None:
    for name, rows in tables.items():
        print(f"\n{name:24} {'real':>10} {'simulated':>10}")
        for quantity, (real, simulated) in rows.items():
            print(f"{quantity:24} {real:10.3f} {simulated:10.3f}")
        print(f"{'largest error':24} {largest_error(rows):21.1%}")


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


def compare(run_dir: Path | str) -> dict[str, tuple[float, float]]:
    """Simulate a run under its own configuration. Returns quantity -> (real, simulated)."""
    calibration = calibrate(run_dir)
    simulated = Achieved.of(simulate(calibration.scenario()).events).as_dict()
    return {name: (real, simulated[name]) for name, real in calibration.achieved.as_dict().items()}


def largest_error(rows: dict[str, tuple[float, float]]) -> float:
    """Of `compare`: relative errors; of fractions of time the difference: 1 % idle is close to 2 %."""
    return max(
        abs(simulated - real) / (1.0 if name in FRACTIONS or not real else abs(real))
        for name, (real, simulated) in rows.items()
    )


if __name__ == "__main__":
    main()
