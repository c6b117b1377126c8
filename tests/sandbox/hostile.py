"""Completions of a model that would rather be rewarded than be right, drawn from the tables of attempts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.sandbox.attempts_files import FILES
from tests.sandbox.attempts_grader import GRADER
from tests.sandbox.attempts_kernel import KERNEL
from tests.sandbox.attempts_processes import PROCESSES

FACTS = {
    "secret": "/root/.ssh/id_rsa",
    "writable": "/etc/hostname",
    "base": "/var/tmp",
    "home": "/root",
    "package": "/usr/lib",
    "shared": "/dev/shm/escape",
    "socket": "/run/docker.sock",
    "abstract": "escape",
    "word": "",
    "pid": 1,
    "port": 22,
}


def completions(
    count: int, draws: random.Random, *, waits: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of a completion and its row. Each joins one to three attempts; none knows the answer.

    Args:
        waits: also attempts that only their time on the clock ends.
    """
    outside = [one for one in (*FILES, *PROCESSES, *KERNEL) if waits or not one.waits]
    grader = [code for name, code in GRADER.items() if waits or not name.endswith("[waits]")]
    for _ in range(count):
        parts = [
            one.code.replace("def attempt(facts)", "def solve(facts)") for one in draws.sample(outside, 2)
        ]
        parts.append(draws.choice(grader))
        draws.shuffle(parts)
        program = "\n".join(_guarded(part) for part in parts[: draws.randint(1, 3)])
        answers = [f"expected-{draws.getrandbits(128):032x}" for _ in range(3)]
        tests = {"fn_name": "solve", "inputs": [[FACTS], [FACTS], [1]], "outputs": answers}
        yield f"I tried.\n```python\n{program}\n```\n", {"tests": tests}


def _guarded(part: str) -> str:
    """A part whose error leaves the next part a try; the function `solve` of the last part counts."""
    lines = "".join(f"    {line}\n" for line in part.splitlines())
    return f"try:\n    pass\n{lines}except Exception as error:\n    print(error)\n"
