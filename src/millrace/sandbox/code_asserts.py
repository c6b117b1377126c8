"""Tests that are Python: asserts that call the program's function, in the forms of MBPP and HumanEval.

Two processes of the sandbox talk through this one: the tests (inside/tester.py), and the program. Neither can
reach the other, and only plain values pass (inside/values.py).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import DataError
from millrace.sandbox.execution import CallAnswer, ProgramOutcome
from millrace.sandbox.program import EndOfProgram, Program

CHECK, CANDIDATE = "check", "candidate"
SETUP = ("test_setup_code", "test_imports", "challenge_setup")


@dataclass(frozen=True)
class CodeAsserts:
    """Tests that call `function`. `setup` runs before the first of them."""

    function: str
    setup: str
    tests: list[str]


def read_asserts(column: Any, columns: Mapping[str, Any], function: str | None = None) -> CodeAsserts | None:
    """The asserts of a row, or None: the column has no Python.

    A list of texts: each is a test, as MBPP's `test_list`. `test_setup_code` and `test_imports` of the row
    run first. A text that defines `check(candidate)`, as HumanEval's `test`: one test.

    Args:
        function: the function to call, before `entry_point` of the row, and the one that the tests name.
    Raises:
        DataError: they are no Python, compare identity, or name several functions and the row none.
    """
    if isinstance(column, str) and f"def {CHECK}(" in column:
        setup, tests = "", [f"{column}\n{CHECK}({CANDIDATE})"]
    elif isinstance(column, list | tuple) and column and all(isinstance(each, str) for each in column):
        lines = [columns.get(name) or "" for name in SETUP]
        setup = "\n".join(each if isinstance(each, str) else "\n".join(each) for each in lines)
        tests = list(column)
    else:
        return None
    trees = [_parsed(each) for each in (setup, *tests)]
    function = function or columns.get("entry_point") or _called(trees)
    return CodeAsserts(function, setup, tests)


def _parsed(code: str) -> ast.Module:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the tests are no Python: {error}: {code[:80]!r}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_identity(node):
            raise DataError(
                f"a test compares identity, and values are copies here: {ast.unparse(node)[:80]!r}; "
                "write == instead of `is`"
            )
    return tree


def _is_identity(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    pairs = zip(node.ops, sides, sides[1:], strict=False)
    return any(isinstance(op, ast.Is | ast.IsNot) and not any(map(_is_one, pair)) for op, *pair in pairs)


def _is_one(side: ast.expr) -> bool:
    """Whether every process has one and the same: None, True, `list`."""
    return isinstance(side, ast.Constant) or (isinstance(side, ast.Name) and side.id in dir(builtins))


def _called(trees: list[ast.Module]) -> str:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = set(_bound(nodes)) | set(dir(builtins))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if len(names := sorted(calls - bound)) != 1:
        raise DataError(f"the tests call {names or 'no function'}: name the one in `entry_point` of the row")
    return names[0]


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def converse(
    program: Program, tester: Program, made: dict[str, Any], code: str, asserts: CodeAsserts
) -> None:
    """Load both, and run each test. `made["answers"]` gets one answer a test: without an error, it passed.

    Raises:
        EndOfProgram: the program ended, hung or forged; tests after that have no answer.
        DataError: the row's tests cannot be run: their setup raises or calls the program, or a test wants
            what no message can say.
        SandboxError.
    """
    names = list(dict.fromkeys([CANDIDATE, asserts.function]))
    loaded = program.ask({"code": code, "function": asserts.function, "plain": True})
    if loaded.get("memory"):
        raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, loaded["error"])
    if "error" in loaded:
        raise EndOfProgram(ProgramOutcome.FAILED, loaded["error"])
    if (why := _ended(None, tester, {"code": asserts.setup, "names": names})) is not None:
        raise DataError(f"the setup of the tests fails: {why}")
    for test in asserts.tests:
        made["answers"].append(CallAnswer(error=_ended(program, tester, test)))
    if program.read_rest():
        raise EndOfProgram(ProgramOutcome.MALFORMED, "the program went on answering after its last call")


def _ended(program: Program | None, tester: Program, message: Any) -> str | None:
    """Why a test failed; None: it passed. Calls go to the program until then; None: there may be none."""
    while True:
        try:
            reply = tester.ask(message)
        except EndOfProgram as end:
            raise EndOfProgram(end.outcome, f"the tests: {end}") from None
        match reply.get("value"):
            case ["call", arguments, keywords]:
                if program is None:
                    raise DataError("the setup of the tests calls the program, which only tests may")
                message = program.ask([arguments, keywords])
                if message.get("memory"):
                    raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, message["error"])
            case ["passed"]:
                return None
            case ["failed", why]:
                return str(why)
            case ["refused", why]:
                raise DataError(f"the tests cannot be run: {why}")
            case other:
                raise EndOfProgram(ProgramOutcome.MALFORMED, f"the tests say {str(other)[:80]!r}")
