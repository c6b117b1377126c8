"""Runs tests that are Python (code_asserts.py).

Two processes of the sandbox talk through this one: the tests (inside/tester.py), and the program. Neither can
reach the other, and only plain values pass (inside/values.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.core.errors import DataError, SandboxError
from millrace_sandbox.code_asserts import CANDIDATE, CodeAsserts
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import CallAnswer, EndOfProgram, Program, ProgramOutcome

OWN_SHARE = 0.5
"""Tests that run out of time before their first call are at fault if they had this share of it."""
LEAST_S = 0.5


class Examination:
    """One program, and its tests.

    Args:
        start: starts a process for tests within limits.
        answers: gets one answer a test: without an error, it passed.
    """

    def __init__(
        self,
        program: Program,
        start: Callable[[Limits], Program],
        asserts: CodeAsserts,
        limits: Limits,
        answers: list[CallAnswer],
    ) -> None:
        self._program, self._start, self._asserts, self._limits = program, start, asserts, limits
        self._answers, self._has_called = answers, False
        self._names = {name: [name, name in asserts.classes] for name in asserts.names}
        self._options = {"shared": asserts.shared, "by_steps": asserts.by_steps}
        self._names[CANDIDATE] = self._names[asserts.function]

    def run(self, code: str, given: str) -> None:
        """Load both, and run each test.

        Raises:
            EndOfProgram: the program ended, hung or forged; tests after that have no answer.
            DataError: the row's tests cannot be run, whatever the program is.
            SandboxError.
        """
        asserts = self._asserts
        tester = self._start(self._left())
        try:
            self._ended(tester, self._begin(), -1)
            changes = {"sees_changes": asserts.sees_changes, **self._options}
            self._program.load(code, asserts.function, given=given, plain=True, **changes)
            for index, test in enumerate(asserts.tests):
                self._answers.append(CallAnswer(error=self._ended(tester, test, index)))
        finally:
            tester.end()
        if not self._has_called:
            raise DataError("the tests never call the program, so that any program would pass")
        if self._program.read_rest():
            raise EndOfProgram(ProgramOutcome.MALFORMED, "the program went on answering after its last call")

    def _begin(self) -> dict[str, Any]:
        begin = {"code": self._asserts.setup, "names": self._names, **self._options}
        return {**begin, "caught": sorted(self._asserts.caught)}

    def _left(self) -> Limits:
        left_s = max(LEAST_S, self._limits.wall_s - self._program.wall_s)
        return Limits(**{**self._limits.to_json(), "wall_s": left_s})

    def _ended(self, tester: Program, message: Any, index: int) -> str | None:
        """Why a test failed; None: it passed. Calls go to the program until then. -1: the setup has none."""
        while True:
            match self._asked(tester, message).get("value"):
                case ["call", *question]:
                    if index < 0:
                        raise DataError("the setup of the tests calls the program, which only tests may")
                    self._has_called = True
                    message = self._program.ask(question)
                    if not self._asserts.sees_changes:
                        message = {key: message[key] for key in message.keys() - {"changed", "given"}}
                    if message.get("memory"):
                        raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, message["error"])
                case ["passed"]:
                    return None
                case ["failed", why]:
                    if not self._has_called:
                        what = "the setup of the tests fails" if index < 0 else "the tests fail before a call"
                        raise DataError(f"{what}: {why}")
                    return str(why)
                case ["raised", why, error, name]:
                    return self._judged(index, str(why), error, name)
                case ["broken", why]:
                    raise SandboxError(
                        f"test {index + 1} fails by a fault of Millrace, not of the program: {why}. Report "
                        "it with the test, and leave the row out until then"
                    )
                case ["refused", why]:
                    raise DataError(f"the tests cannot be run: {why}")
                case other:
                    raise EndOfProgram(ProgramOutcome.MALFORMED, f"the tests say {str(other)[:80]!r}")

    def _asked(self, tester: Program, message: Any) -> Any:
        """Raises: DataError: the tests end before any call, so that it is no work of the program."""
        began_s = tester.wall_s
        try:
            return tester.ask(message)
        except EndOfProgram as end:
            is_slow = end.outcome is ProgramOutcome.TIMED_OUT
            was_short = is_slow and tester.wall_s - began_s < OWN_SHARE * self._limits.wall_s
            if self._has_called or was_short:
                raise EndOfProgram(end.outcome, f"the tests: {end}") from None
            raise DataError(
                f"the tests cannot be run: they end before they call the program: {end}"
            ) from None

    def _judged(self, index: int, why: str, error: list[Any], name: str | None) -> str:
        """Why the test failed, if the error of its own code is a work of the program.

        Raises: DataError: it is not: it comes before any call, or with any value that a program may give.
        """
        is_own = not self._has_called or name in self._asserts.unbound
        if index < 0:
            raise DataError(f"the setup of the tests fails: {why}")
        if is_own or self._raises_anyway(index, error):
            raise DataError(f"the tests cannot be run: test {index + 1}: {why}")
        if error[0] == MemoryError.__name__:
            raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, f"the tests need more memory: {why}")
        return why

    def _raises_anyway(self, index: int, error: list[Any]) -> bool:
        """Whether the test raises this error in this line for each of several values in place of the
        program's answers. No program has a part in that, so that none can make its tests seem broken."""
        tester = self._start(self._left())
        asserts = self._asserts
        try:
            reply = tester.ask({**self._begin(), "instead": asserts.tests[: index + 1], "error": error})
            return bool(reply.get("value") == ["same"])
        except EndOfProgram:
            return False
        finally:
            tester.end()
