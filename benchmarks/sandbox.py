"""What a sandbox costs, at each level that this machine has, and whether hostile programs earn anything.

    python benchmarks/sandbox.py [--programs 200] [--rounds 5] [--hostile 1000] [--json]

A program is a function of three lines with five tests. Figures are medians over `--rounds`.

warm      programs in one warm process, one after the other: per second on the clock, and per CPU second of
          all processes (the caller's, the warm one's, the wardens' and the programs')
cold      the same with a new warm process for each program
python    for comparison: `python -c` with the same function and its tests, and no confinement at all
hostile   completions drawn from the tables of attempts in tests/sandbox (seeded), through the code reward at
          the strongest level: how many earned a reward, and how many calls of the reward failed
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from common import ROOT, parser_of, report, say, sized, table

from millrace.core.errors import SandboxError
from millrace_sandbox.code_tests import judge, read_tests
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.sandbox import LEVELS, Sandbox

CODE = "def solve(a, b):\n    total = sum(range(a, b))\n    return [total, str(total)]\n"
INPUTS = [[0, 10], [5, 6], [1, 100], [3, 3], [-4, 4]]
OUTPUTS = [[sum(range(*one)), str(sum(range(*one)))] for one in INPUTS]
TESTS = read_tests({"fn_name": "solve", "inputs": INPUTS, "outputs": OUTPUTS})


def rates(work: Callable[[], None], programs: int) -> tuple[float, float]:
    """Programs per second and per CPU second. `work` reaps all its processes."""
    before, began_s = os.times(), time.perf_counter()
    work()
    took_s, after = time.perf_counter() - began_s, os.times()
    return programs / took_s, programs / (sum(after[:4]) - sum(before[:4]))


def pass_all(sandbox: Sandbox, programs: int) -> None:
    for _ in range(programs):
        verdict = judge(sandbox, CODE, TESTS, Limits())
        assert verdict.num_passed == len(INPUTS), verdict


def warm(level: str, programs: int) -> None:
    with Sandbox(level, strongest=level) as sandbox:
        pass_all(sandbox, programs)


def cold(level: str, programs: int) -> None:
    for _ in range(programs):
        warm(level, 1)


def unconfined(programs: int) -> None:
    calls = "\n".join(f"assert solve(*{x}) == {y}" for x, y in zip(INPUTS, OUTPUTS, strict=True))
    for _ in range(programs):
        subprocess.run([sys.executable, "-I", "-c", CODE + calls], check=True)


def hostile(count: int) -> dict[str, int]:
    """Rewards and failures of hostile completions, and how they ended."""
    sys.path.insert(0, str(ROOT))
    from tests.sandbox.hostile import completions

    from millrace.config.tables.task import CodeRewardSection
    from millrace_sandbox.code_reward import CodeReward

    reward = CodeReward(CodeRewardSection(score="share", program_cpu_s=1, timeout_s=5, program_memory_mb=256))
    found = Counter({"completions": count, "rewarded": 0, "failed": 0})
    for completion, row in completions(count, random.Random(0)):
        try:
            scored = reward(completion, None, row)
        except SandboxError as error:
            say(f"failed: {error}")
            found["failed"] += 1
            continue
        found["rewarded"] += scored.pop("reward") > 0
        found.update({key: int(value) for key, value in scored.items() if value and key != "tests_passed"})
    reward.close()
    return dict(found)


def measure(programs: int, rounds: int) -> dict[str, Any]:
    works: dict[str, tuple[Callable[[int], None], int]] = {}
    for level in LEVELS:
        try:
            Sandbox(level, strongest=level).close()
        except SandboxError as error:
            say(f"left out: {error}")
            continue
        works[f"warm, {level}"] = (lambda count, level=level: warm(level, count), programs)
        works[f"cold, {level}"] = (lambda count, level=level: cold(level, count), max(1, programs // 20))
    works["python, unconfined"] = (unconfined, max(1, programs // 10))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for index in range(rounds):
        for name, (work, count) in works.items():
            found[name].append(rates(lambda work=work, count=count: work(count), count))
        say(f"round {index + 1} of {rounds}")
    return {
        name: {"per_s": median(one[0] for one in pairs), "per_cpu_s": median(one[1] for one in pairs)}
        for name, pairs in found.items()
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--programs", type=int, default=sized(200, 5))
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--hostile", type=int, default=sized(1000, 5))
    options = parser.parse_args()
    speeds = measure(options.programs, options.rounds)
    table(speeds, first="programs")
    found = hostile(options.hostile)
    report({"speeds": speeds, **found}, as_json=options.json)


if __name__ == "__main__":
    main()
