"""A model that somebody else trained: trained tokens/s of whole runs, and the trainer's memory.

    python benchmarks/real.py --model DIRECTORY [--beside TREE] [--rounds 3] [--json]

`make real` makes such a DIRECTORY. TREE is another version of Millrace with a `.venv` of its own, which runs
in float32 in the same rounds. The task is sums of two numbers. Time counts from the end of the first step.
Memory is the peak of the trainer's resident memory, with Python and torch. The gap is that of the log-probs
of engine and trainer at staleness 0, in nats.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, ROOT, medians, parser_of, report, require, say, table

from millrace.observe.sinks.log_files import opened

STEPS, LONGEST = 10, 40
CONFIG = """
steps = {steps}
model = {{ path = "{model}", dtype = "{dtype}" }}
batch = {{ prompts = 4, group_size = 8 }}
sampling.max_tokens = {longest}
optimizer.lr = 2e-6
schedule = {{ kind = "millrace", staleness_max = 2 }}
rollout.max_sequence_tokens = 160

[task]
kind = "gym"
name = "chain_sum"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }}
template = "{{question}} Answer with the number only."
chat = true

[reward]
kind = "math"
"""


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    with opened(run / "events.jsonl") as files:
        events = [json.loads(line) for _, lines in files for line in lines if line.endswith(b"\n")]
    return [event for event in events if event["kind"] == kind]


def peak_bytes(pid: int) -> int:
    """Of a process that may have ended: then 0."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), default=0)


def measured(tree: Path, model: Path, dtype: str, directory: Path) -> dict[str, float]:
    """One run, with the threads that it chooses itself."""
    directory.mkdir()
    config, run, peak = directory / "run.toml", directory / "run", 0
    config.write_text(CONFIG.format(steps=STEPS, model=model.resolve(), dtype=dtype, longest=LONGEST))
    command: list[str | Path] = [
        tree / ".venv/bin/python",
        "-m",
        "millrace",
        "train",
        config,
        "--run-dir",
        run,
    ]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory)
        while process.poll() is None:
            time.sleep(0.2)
            started = events_of(run, "worker_started") if (run / "events.jsonl").exists() else []
            peak = max([peak, *(peak_bytes(e["pid"]) for e in started if e["name"] == "trainer")])
    if process.returncode:
        raise SystemExit((directory / "log").read_text())
    steps = events_of(run, "step")
    gap = json.loads((run / "summary.json").read_text())["logprob_gap_staleness0"]
    seconds = steps[-1]["time_s"] - steps[0]["time_s"]
    return {
        "tokens_per_s": sum(step["trained_tokens"] for step in steps[1:]) / seconds,
        "peak_memory": float(peak),
        "gap_mean": gap["mean"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory")
    parser.add_argument("--beside", type=Path, help="another version of Millrace, with its .venv")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    require(args.model, "--model DIRECTORY, the directory of a model")
    contestants = {"float32": (ROOT, "float32"), "bfloat16": (ROOT, "bfloat16")}
    if args.beside is not None:
        contestants["before"] = args.beside.resolve(), "float32"
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for name, (tree, dtype) in contestants.items():
                directory = Path(temporary) / f"{name}-{number}"
                rounds[name].append(measured(tree, args.model, dtype, directory))
                say(f"round {number + 1}, {name}: {rounds[name][-1]}")
    found = {name: medians(values) for name, values in rounds.items()}
    result: dict[str, Any] = {"rounds": rounds, "gap_bf16_mean": found["bfloat16"]["gap_mean"]}
    result["bf16_over_float32"] = found["bfloat16"]["tokens_per_s"] / found["float32"]["tokens_per_s"]
    if "before" in found:
        before = found["before"]
        result["bf16_over_float32_today"] = found["bfloat16"]["tokens_per_s"] / before["tokens_per_s"]
        result["float32_over_today"] = found["float32"]["tokens_per_s"] / before["tokens_per_s"]
        result["peak_memory_over_today"] = found["float32"]["peak_memory"] / before["peak_memory"]
    table({name: {key: f"{value:,.5g}" for key, value in row.items()} for name, row in found.items()})
    report(result, as_json=args.json)


if __name__ == "__main__":
    main()
