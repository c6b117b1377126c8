"""The reward of programs: a program in a completion, run in a sandbox, and judged by the tests of its row."""

from __future__ import annotations

from typing import Any

from millrace.config.tables.task import CodeRewardSection
from millrace.core.errors import DataError
from millrace.rewards.program_text import program_of
from millrace.tasks.chat import is_messages
from millrace.tasks.rows import Row, find_column
from millrace_sandbox.code_asserts import CodeAsserts, code_given, continued, read_asserts
from millrace_sandbox.code_tests import judge, needed_beyond, read_tests
from millrace_sandbox.inside.limits import Limits, MiB
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

SHARE_OF_DEADLINE = 0.8
"""The sandbox ends a program before the deadline of its score."""
_UNCOUNTED = (ProgramOutcome.PASSED, ProgramOutcome.FAILED)


class CodeReward:
    """1 if the program passes every test, else 0; or the share of the tests that pass.

    Metrics: `tests_passed` is that share, and `tests_run` the number of tests that the program was run on.
    `timed_out`, `out_of_memory`, `killed` and `malformed` are 1 for a program that ended so. A failure of the
    sandbox is raised: it says nothing about the program.

    Raises:
        SandboxError: this machine has no sandbox as strong as `isolation`.
    """

    is_async = False
    file: str | None = None

    def __init__(self, config: CodeRewardSection, prompt: str = "prompt") -> None:
        self._config, self._prompt = config, prompt
        self._sandbox = Sandbox(config.isolation)
        self._limits = Limits(
            cpu_s=config.program_cpu_s,
            wall_s=SHARE_OF_DEADLINE * config.timeout_s,
            memory_bytes=config.program_memory_mb * MiB,
        )
        self.name = f"the tests of the program (sandbox: {self._sandbox.level})"

    def __call__(self, completion: str, answer: Any, columns: Row) -> dict[str, float]:
        column = find_column(columns, self._config.tests)
        if column is None:
            told = f"names the column {self._config.tests!r}, and there are only {sorted(columns)}"
            raise DataError(f"the row has no tests: `reward.tests` {told}")
        function = self._config.function
        prompt = _text_of(find_column(columns, self._prompt))
        asserts = None if needed_beyond(columns) else read_asserts(column, columns, function, prompt)
        tests = asserts or read_tests(column, function, columns)
        code, given = program_of(completion, tests.function), ""
        if tests.function is not None:
            named = code_given(prompt, tests.function)
            given = tests.given if isinstance(tests, CodeAsserts) else named
            code = continued(code, tests.function, prompt)
        verdict = judge(self._sandbox, code, tests, self._limits, given=given)
        share = verdict.num_passed / verdict.num_tests
        passed = verdict.outcome is ProgramOutcome.PASSED
        reward = share if self._config.score == "share" else float(passed)
        ends = (one for one in ProgramOutcome if one not in _UNCOUNTED)
        counted = {one.name.lower(): float(verdict.outcome is one) for one in ends}
        ran = {"tests_passed": share, "tests_run": float(verdict.num_run)}
        return {"reward": reward, **ran, **counted}

    def close(self) -> None:
        """End the sandbox. It also ends with this process."""
        self._sandbox.close()


def _text_of(prompt: Any) -> str:
    """A prompt as text; of messages, the last one of a user."""
    if is_messages(prompt):
        contents = [one.get("content") for one in prompt if one.get("role") == "user"]
        prompt = contents[-1] if contents else ""
    return prompt if isinstance(prompt, str) else ""
