"""Every attempt to get out fails, at every level that this machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import CallAnswer
from millrace_sandbox.sandbox import Sandbox
from tests.sandbox.attempt import Attempt
from tests.sandbox.attempts_files import FILES
from tests.sandbox.attempts_kernel import KERNEL
from tests.sandbox.attempts_processes import PROCESSES

ATTEMPTS = [*FILES, *PROCESSES, *KERNEL]
LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20, files=200)
REFUSED = {
    *("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError", "ProcessLookupError"),
    *("BlockingIOError", "FileExistsError", "gaierror", "MemoryError", "RuntimeError", "ValueError"),
}


def tried(sandbox: Sandbox, attempt: Attempt, facts: dict[str, Any]) -> tuple[bool, str]:
    """Whether the attempt got out, and what held it."""
    limits = replace(
        LIMITS, processes=8 if attempt.forks else 1, wall_s=0.5 if attempt.waits else LIMITS.wall_s
    )
    execution = sandbox.call(attempt.code, "attempt", [[facts]], limits)
    if execution.fault is not None:
        return False, f"{execution.fault.value}: {execution.reason}"
    (answer,) = execution.answers
    if answer.error is not None:
        assert answer.error.split(":")[0] in REFUSED, f"a blank shot: {answer.error}"
    return answer == CallAnswer(True), answer.error or str(answer.value)


def names(attempts: list[Attempt]) -> list[str]:
    return [attempt.name.replace(" ", "-") for attempt in attempts]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=names(ATTEMPTS))
def test_an_attempt_to_get_out_fails(isolated: Sandbox, attempt: Attempt, facts: dict[str, Any]) -> None:
    if attempt.forks and isolated.level != "namespaces":
        pytest.skip("several processes need the level 'namespaces'")
    escaped, why = tried(isolated, attempt, facts)
    assert not escaped, why
    assert Path(facts["secret"]).read_text() == "word"
    assert Path(facts["writable"]).read_text() == "kept"
    assert sorted(path.name for path in Path(facts["base"]).iterdir()) == ["secret", "writable"]
    assert sandbox_works(isolated)


BARE = [attempt for attempt in ATTEMPTS if attempt.bare]


@pytest.mark.parametrize("attempt", BARE, ids=names(BARE))
def test_where_there_are_only_limits_the_attempt_does_get_out(
    bare: Sandbox, attempt: Attempt, facts: dict[str, Any]
) -> None:
    escaped, why = tried(bare, attempt, facts)
    if why.startswith("PermissionError"):
        pytest.skip("something else refuses it here, such as a container")
    assert escaped, why


def sandbox_works(sandbox: Sandbox) -> bool:
    return sandbox.call("def f(x): return x + 1", "f", [[1]]).answers == [CallAnswer(2)]


def test_there_are_enough_attempts_and_each_has_a_name_of_its_own() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 60
