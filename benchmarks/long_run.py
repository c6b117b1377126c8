"""Whether a long run stays as it began: memory, open files, ledger, step time, reported as slopes.

    python benchmarks/long_run.py [--steps 10000] [--json]

A tiny model, so that steps are nearly all machinery. A sample a second; slopes are least squares over
the last four fifths of the samples, per 1,000 steps. Resident memory counts shared pages in every
process that has them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from common import parser_of, sized
from tiny_run import tiny_run

from millrace.chaos.child_run import ChildRun

SAMPLE_S = sized(1.0, 0.1)
QUIET_S_MAX = 120.0
MB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


def sample(run: ChildRun) -> dict[str, float]:
    """Resident MB and open files of every process, and bytes on disk."""
    numbers: dict[str, float] = {}
    for role in ("controller", "forkserver", "trainer", "relay", "replica", "reward worker"):
        for name, pid in run.pids(role).items():
            numbers[f"{name} resident MB"] = (
                int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MB
            )
            numbers[f"{name} open files"] = len(os.listdir(f"/proc/{pid}/fd"))
    for path in run.directory.path.glob("*.*"):
        name = path.name.removesuffix("-wal").removesuffix("-shm")
        numbers[f"{name} MB"] = numbers.get(f"{name} MB", 0.0) + path.stat().st_size / MB
    return numbers


def watch(run: ChildRun, steps: int) -> list[tuple[int, dict[str, float]]]:
    """(version, numbers) once a second until the last step."""
    samples, version, moved_s = [], 0, time.monotonic()
    began_s = None
    while run.exit_code is None:
        run.poll()
        run.events.clear()
        if version < run.version < steps:
            now_s = time.monotonic()
            if began_s is not None:
                try:
                    numbers = sample(run)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # a process ended meanwhile
                numbers["step s"] = (now_s - began_s) / (run.version - version)
                samples.append((run.version, numbers))
            version, moved_s, began_s = run.version, now_s, now_s
        if run.version < steps and time.monotonic() - moved_s > QUIET_S_MAX:
            raise SystemExit(f"no step for {QUIET_S_MAX:g} s:\n{run.last_words()}")
        time.sleep(SAMPLE_S)
    if run.exit_code:
        raise SystemExit(f"the run failed:\n{run.last_words()}")
    return samples


def slopes(samples: list[tuple[int, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Per quantity: its first and last value, and its slope per 1,000 steps."""
    late = samples[len(samples) // 5 :]
    result = {}
    for name in sorted(late[len(late) // 2][1]):
        points = [(version, numbers[name]) for version, numbers in late if name in numbers]
        result[name] = {
            "first": points[0][1],
            "last": points[-1][1],
            "per_1000_steps": 1000 * least_squares_slope(points),
        }
    return result


def least_squares_slope(points: list[tuple[int, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=sized(10_000, 30))
    options = parser.parse_args()
    overrides = ("schedule.kind=laminar", "checkpoints.every=100", "batch.prompts=2", "sampling.max_tokens=8")
    began_s = time.monotonic()
    with tiny_run(f"steps={options.steps}", *overrides) as run:
        run.start()
        result = slopes(watch(run, options.steps))
    print(f"{'':28} {'first':>10} {'last':>10} {'per 1,000 steps':>16}")
    for name, numbers in result.items():
        row = f"{numbers['first']:10.3f} {numbers['last']:10.3f} {numbers['per_1000_steps']:16.4f}"
        print(f"{name:28} {row}")
    print(f"{options.steps} steps in {time.monotonic() - began_s:.0f} s")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
