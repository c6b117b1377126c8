"""No program gets a test to pass without the answer, at any level."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from millrace_sandbox.code_tests import judge, read_tests
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox
from tests.long import long
from tests.sandbox.attempts_grader import GRADER

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)


@long
@pytest.mark.parametrize("name", GRADER, ids=[name.replace(" ", "-") for name in GRADER])
def test_a_program_without_the_answer_passes_nothing(any_level: Sandbox, name: str) -> None:
    outputs = [f"expected-{secrets.token_hex(16)}" for _ in range(2)]
    tests = read_tests({"fn_name": "solve", "inputs": [[1], [2]], "outputs": outputs})
    limits = replace(LIMITS, wall_s=0.5) if name.endswith("[waits]") else LIMITS
    verdict = judge(any_level, GRADER[name], tests, limits)
    assert verdict.num_passed == 0
    assert verdict.outcome is not ProgramOutcome.PASSED
    assert verdict.reason
