"""What the benchmarks share: medians, tables, JSON, and a place for what they prepare once."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from millrace.observe.sinks.log_files import opened

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads spin at barriers

QUICK = "--quick" in sys.argv or "BENCHMARK_QUICK" in os.environ
"""Whether it is only to show that it runs: every size is tiny, and nothing is kept."""
if QUICK:
    os.environ["BENCHMARK_QUICK"] = "1"  # for the processes that a benchmark starts

ROOT = Path(__file__).parents[1]

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""For every process that a benchmark starts."""


def environment_of(threads: int | None) -> dict[str, str]:
    """`ENVIRONMENT` with this number of threads, which wait without spinning. None: it sets no number."""
    shared = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    if threads is None:
        return shared
    waiting = {} if threads == 1 else {"OMP_WAIT_POLICY": "PASSIVE"}
    return shared | {"OMP_NUM_THREADS": str(threads)} | waiting


RUN_TIMEOUT_S = 1800.0


T = TypeVar("T")


def sized(full: T, quick: T) -> T:
    """A size: in full, and with `--quick`."""
    return quick if QUICK else full


def parser_of(text: str) -> argparse.ArgumentParser:
    """With the options that every benchmark has. `text`: its docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: shows that it runs")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    return parser


def require(there: object, what: str) -> None:
    """End where `what` is needed and not `there`: as an error, and with `--quick` as one that is skipped."""
    if not there:
        if QUICK:
            say(f"skipped: {what}")
        raise SystemExit(0 if QUICK else what)


@cache
def kept_directory() -> Path:
    """Start models and finished runs. With `--quick` a new one, that goes with this process."""
    if not QUICK:
        return cache_directory()
    path = Path(tempfile.mkdtemp(prefix="millrace-benchmark-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def cache_directory() -> Path:
    """What is kept, and peers' virtual environments; safe to remove."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = root / "millrace-benchmarks"
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_logged(command: Sequence[Any], log: Path, *, threads: int | None = 1) -> None:
    """Run it with its output in `log`, which is shown if it fails. `threads`: as `environment_of`."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = environment_of(threads) | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=RUN_TIMEOUT_S)
        ended = f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = f"killed, not done after {RUN_TIMEOUT_S:g} s"
    if ended:
        raise SystemExit(f"{log.read_text()[-3000:]}\n{[str(word) for word in command]}: {ended}")


def train(
    config: str, directory: Path, *, threads: int | None = 1, sets: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """`millrace train` with this configuration (TOML) in a new `directory`; returns its events. `sets`: keys
    with other values, as "key=value"."""
    directory.mkdir()
    (directory / "run.toml").write_text(config)
    arguments = ["-m", "millrace", "train", directory / "run.toml", "--run-dir", directory / "run"]
    arguments += [word for one in sets for word in ("--set", one)]
    run_logged([sys.executable, *arguments], directory / "log", threads=threads)
    with opened(directory / "run" / "events.jsonl") as files:
        return [json.loads(line) for _, lines in files for line in lines]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every number over rounds."""
    return {name: median([one[name] for one in rounds]) for name in rounds[0]}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Mapping[str, Mapping[str, Any]], *, first: str = "") -> None:
    """One line per row, one column per key of the first one."""
    columns = list(next(iter(rows.values())))
    width = max(len(first), *(len(name) for name in rows))
    widths = [max(len(column), 9) for column in columns]
    print("  ".join([first.ljust(width), *(c.rjust(w) for c, w in zip(columns, widths, strict=True))]))
    for name, row in rows.items():
        cells = (_cell(row.get(c)).rjust(w) for c, w in zip(columns, widths, strict=True))
        print("  ".join([name.ljust(width), *cells]))


def report(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Every number of `result`, and with `as_json` one JSON object on the last line."""
    print()
    for name, value in result.items():
        if not isinstance(value, dict | list):
            print(f"{name:36} {_cell(value)}")
    if as_json:
        print(json.dumps(result))


def parts_of(document: Path, script: str) -> tuple[str, str, str]:
    """The text of `document` before the table that `script` writes into it, the table, and the text after."""
    begin, end = f"<!-- benchmarks/{script} --write -->\n", "<!-- end -->\n"
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    written, _, after = rest.partition(end)
    return before + begin, written, end + after


def write_table(document: Path, script: str, lines: Sequence[str]) -> None:
    """Put the lines of a table into `document`, in place of those that `script` wrote before."""
    before, _, after = parts_of(document, script)
    document.write_text(before + "".join(f"{line}\n" for line in lines) + after, encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )
