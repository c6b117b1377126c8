"""Simulated against real: the quickstart's model trained here under three schedules, then each run simulated
with the costs and lengths that its own directory gives.

    python benchmarks/real_run.py             # three runs of about 20 s, alone on the machine
    python benchmarks/real_run.py --runs A B  # compare runs that are there
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ENVIRONMENT, cache_directory

from millrace.sim.calibrate import compare, largest_error

SCHEDULES: dict[str, dict[str, object]] = {
    "synchronous": {"kind": "synchronous"},
    "areal": {"kind": "areal", "eta": 2},
    "laminar": {"kind": "laminar", "staleness_max": 2, "repack_interval_s": 0.5},
}
STEPS = 80

Table = dict[str, tuple[float, float]]
"""Quantity -> (real, simulated)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quickstart", type=Path, help="a configuration that the quickstart wrote")
    parser.add_argument("--runs", type=Path, nargs="*", help="run directories to compare instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tables = {run.name: compare(run) for run in arguments.runs or ()} or trained(arguments.quickstart)
    if arguments.json:
        print(json.dumps({"runs": tables, "real_run": worst(tables)}, indent=2))
        return
    for name, table in tables.items():
        print(f"\n{name:24} {'real':>10} {'simulated':>10}")
        for quantity, (real, simulated) in table.items():
            print(f"{quantity:24} {real:10.3f} {simulated:10.3f}")
        print(f"{'largest error':24} {largest_error(table):21.1%}")


def trained(quickstart: Path | None = None) -> dict[str, Table]:
    """One real run under each schedule beside its simulation. Without a configuration the quickstart makes
    one, and the start model, once: about a minute."""
    config = quickstart or cache_directory() / "quickstart" / "quickstart.toml"
    if not config.exists():
        command = [sys.executable, "-m", "millrace", "quickstart", "--run-dir", str(config.parent)]
        _quietly(command)
    with tempfile.TemporaryDirectory() as scratch:
        return {name: compare(train(config, name, Path(scratch))) for name in SCHEDULES}


def worst(tables: dict[str, Table]) -> float:
    return max(largest_error(table) for table in tables.values())


def train(config: Path, name: str, scratch: Path) -> Path:
    """One real run in a process of its own. Returns its directory."""
    run = scratch / name
    sets = [f"schedule.{key}={value}" for key, value in SCHEDULES[name].items()] + [f"steps={STEPS}"]
    words = [word for override in sets for word in ("--set", override)]
    command = [sys.executable, "-m", "millrace", "train", str(config), *words, "--run-dir", str(run)]
    _quietly(command)
    return run


def _quietly(command: list[str]) -> None:
    null = subprocess.DEVNULL
    subprocess.run(command, check=True, stdout=null, stderr=null, timeout=600, env=ENVIRONMENT)


if __name__ == "__main__":
    main()
