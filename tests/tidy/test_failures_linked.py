"""Every row of docs/failures.md has a test that names it. (A test that names no row fails by itself.)"""

from __future__ import annotations

import re
from pathlib import Path

from tests.commands.failure_rows import rows

TESTS = sorted((Path(__file__).parents[1] / "commands").glob("test_failures_*.py"))
NAMED = re.compile(r'"((?:[a-z]+-)+[a-z0-9]+)"')


def named() -> set[str]:
    found = {name for path in TESTS for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    broken = re.search(r"BROKEN_REWARDS = \((.*?)\)", "".join(path.read_text() for path in TESTS), re.DOTALL)
    assert broken is not None
    return found | {f"reward-{how}" for how in re.findall(r'"(\w+)"', broken[1])}


def test_every_row_has_a_test() -> None:
    assert set(rows()) <= named()
