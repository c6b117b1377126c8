"""What a sandbox reports of a program, what it leaves, and what becomes of its own failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from millrace.core.errors import DataError, SandboxError
from millrace.runtime import process
from millrace_sandbox.code_tests import is_equal, judge, read_tests
from millrace_sandbox.inside import zygote
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import CallAnswer, ProgramOutcome
from millrace_sandbox.sandbox import Sandbox, _WarmProcess
from tests.long import long
from tests.sandbox.test_escapes import sandbox_works

LIMITS = Limits(cpu_s=1, wall_s=30)


def test_calls_have_answers_in_order_and_an_exception_is_one(any_level: Sandbox) -> None:
    execution = any_level.call("def f(x): return 6 / x", "f", [[3], [0], [2]], LIMITS)
    assert execution.answers == [
        CallAnswer(2.0),
        CallAnswer(None, "ZeroDivisionError: division by zero"),
        CallAnswer(3.0),
    ]
    assert execution.fault is None


def test_what_a_program_prints_is_kept_apart_from_its_answers(any_level: Sandbox) -> None:
    execution = any_level.call(
        "import sys\ndef f():\n print('é')\n print('no', file=sys.stderr)\n", "f", [[]], LIMITS
    )
    assert sorted(execution.output.split()) == ["no", "é"]


def test_a_program_without_a_function_reads_and_prints(any_level: Sandbox) -> None:
    execution = any_level.run("print(sum(map(int, input().split())))", b"1 2 3\n", LIMITS)
    assert (execution.stdout, execution.fault) == (b"6\n", None)


def test_a_program_may_write_at_its_end_and_exit_with_success(any_level: Sandbox) -> None:
    code = "import atexit, sys\natexit.register(lambda: print('end'))\nsys.exit(0)"
    assert any_level.run(code, b"", LIMITS).stdout == b"end\n"


@pytest.mark.parametrize(
    "end", ["exit()", "quit()", "exit(0)", "sys.stdout = None; sys.__stdout__.write('3\\n')"]
)
def test_a_program_may_end_as_in_any_python(any_level: Sandbox, end: str) -> None:
    """Programs of contests call `exit`, which Python has with its module `site` alone."""
    execution = any_level.run(f"import sys\n'stdout' in {end!r} or print(3)\n{end}", b"", LIMITS)
    assert (execution.fault, execution.stdout) == (None, b"3\n")


def test_a_large_input_reaches_a_program_that_answers_it(any_level: Sandbox) -> None:
    text = "x" * 500_000
    assert any_level.call("def f(x): return x", "f", [[text]], LIMITS).answers == [CallAnswer(text)]


@long
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def f():\n while True: pass", ProgramOutcome.TIMED_OUT),
        ("def f(): return bytearray(2**33)", ProgramOutcome.OUT_OF_MEMORY),
        ("import os\ndef f(): os.abort()", ProgramOutcome.KILLED),
        ("import os\ndef f(): os.write(4, b'x' * 8)", ProgramOutcome.MALFORMED),
        ("def f(", ProgramOutcome.FAILED),
    ],
)
def test_each_end_of_a_program_has_its_name(any_level: Sandbox, code: str, fault: ProgramOutcome) -> None:
    execution = any_level.call(code, "f", [[]], LIMITS)
    assert execution.fault is fault
    assert execution.reason


def test_each_program_begins_with_a_clean_directory_and_a_clean_python(any_level: Sandbox) -> None:
    code = "import json, os\ndef f():\n open('left', 'w').close()\n json.left = 1\n return os.listdir('.')"
    first, second = (any_level.call(code, "f", [[]], LIMITS) for _ in range(2))
    assert first.answers == second.answers == [CallAnswer(["left"])]
    assert any_level.call("import json\ndef f(): return hasattr(json, 'left')", "f", [[]]).answers == [
        CallAnswer(False)
    ]


def test_a_program_may_use_files_and_modules_of_python(any_level: Sandbox) -> None:
    code = (
        "import sqlite3, tempfile, uuid\ndef f():\n with tempfile.TemporaryFile() as file: file.write(b'x')"
    )
    assert any_level.call(code, "f", [[]], LIMITS).answers == [CallAnswer(None)]


def test_asyncio_runs(isolated: Sandbox) -> None:
    code = (
        "import asyncio\nasync def g():\n await asyncio.sleep(0)\n return 5\ndef f(): return asyncio.run(g())"
    )
    assert isolated.call(code, "f", [[]], LIMITS).answers == [CallAnswer(5)]


def test_several_processes_are_refused_below_namespaces(sandboxes: dict[str, Sandbox | str]) -> None:
    for level, sandbox in sandboxes.items():
        if isinstance(sandbox, Sandbox) and level != "namespaces":
            with pytest.raises(SandboxError, match="several processes need"):
                sandbox.call("def f(): pass", "f", [[]], Limits(processes=2))


def test_nothing_is_left_when_a_sandbox_is_closed(any_level: Sandbox, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(any_level.level, strongest=any_level.level) as sandbox:
        sandbox.call("open('left', 'w').close()\ndef f(): pass", "f", [[]])
        pid = sandbox._warm._process.pid
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()


PREPARED = """
import os, sys
from millrace_sandbox.inside.zygote import prepare
prepare("limits", ["/usr"], sys.argv[1], sys.argv[2:])
print(os.geteuid())
"""


@pytest.mark.parametrize("closed", ["where packages are", "where programs work"])
def test_root_stays_root_where_another_user_could_not_read(closed: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "work").mkdir()
    paths = ["", str(tmp_path)] if closed == "where packages are" else [str(tmp_path / "work")]
    ran = subprocess.run([sys.executable, "-c", PREPARED, *paths], check=True, capture_output=True, text=True)
    assert int(ran.stdout) == os.geteuid()


def test_a_warm_process_that_is_gone_is_replaced_and_the_program_runs_again(any_level: Sandbox) -> None:
    with Sandbox(any_level.level, strongest=any_level.level) as sandbox:
        os.kill(sandbox._warm._process.pid, signal.SIGKILL)
        assert sandbox_works(sandbox)


def test_a_sandbox_that_fails_twice_is_an_error_and_no_verdict(any_level: Sandbox, monkeypatch) -> None:
    def refuse(self: object, level: str) -> None:
        raise SandboxError("no process")

    with Sandbox(any_level.level, strongest=any_level.level) as sandbox:
        os.kill(sandbox._warm._process.pid, signal.SIGKILL)
        monkeypatch.setattr(_WarmProcess, "__init__", refuse)
        with pytest.raises(SandboxError, match="no process"):
            judge(
                sandbox,
                "def f(): pass",
                read_tests({"fn_name": "f", "inputs": [[]], "outputs": [None]}),
                LIMITS,
            )


def test_a_level_that_is_missing_is_refused_by_name_and_reason(monkeypatch) -> None:
    monkeypatch.setattr("millrace_sandbox.sandbox._START", "raise SystemExit('no kernel')")
    with pytest.raises(
        SandboxError, match=r"'landlock'.*\n  namespaces: .*no kernel\n  landlock: .*no kernel"
    ):
        Sandbox()


def test_an_unknown_machine_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(zygote.MissingLayer, match="riscv64"):
        zygote.prepare("landlock", [], "")


# ---------------------------------------------------------------- tests as data


def test_values_are_compared_as_json() -> None:
    assert is_equal([1, {"a": "x"}, None, True], (1, {"a": "x"}, None, True))
    assert is_equal(0.1 + 0.2, 0.3)
    assert is_equal(2.0, 2)
    for value, expected in [
        (1, True),
        (True, 1),
        (0, None),
        ("1", 1),
        ([1], [1, 2]),
        ({"a": 1}, {}),
        (10**400, 1.5),
    ]:
        assert not is_equal(value, expected)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("{", "no JSON"),
        ([1], 'need "inputs" and "outputs"'),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "list of arguments"),
        ({"inputs": [{}], "outputs": ["1"]}, "a text"),
    ],
)
def test_tests_that_judge_nothing_are_refused(column: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_tests(column)


def test_printed_lines_are_compared_by_their_words(any_level: Sandbox) -> None:
    tests = read_tests(json.dumps({"inputs": ["1", "2"], "outputs": ["1  2\n", "2 3"]}))
    verdict = judge(any_level, "x = int(input())\nprint(x, x + 1, '\\n')", tests, LIMITS)
    assert (verdict.outcome, verdict.num_passed, verdict.num_tests) == (ProgramOutcome.PASSED, 2, 2)


def test_a_part_of_the_tests_is_counted(any_level: Sandbox) -> None:
    tests = read_tests({"inputs": [[1], [2]], "outputs": [1, 5]}, "f")
    verdict = judge(any_level, "def f(x): return x", tests, LIMITS)
    assert (verdict.outcome, verdict.num_passed) == (ProgramOutcome.FAILED, 1)
    assert verdict.reason.startswith("test 2 of 2: it gave 2")


@pytest.mark.parametrize("printed", ["wrong", "killed", "huge"])
def test_a_verdict_on_printed_tests_is_that_of_the_first_fault(any_level: Sandbox, printed: str) -> None:
    """Whatever the last test says."""
    ends = {"wrong": "print(0)", "killed": "import os; os.abort()", "huge": "x = bytearray(2**33)"}
    code = f"x = input()\nif x == '2':\n    {ends[printed]}\nelse:\n    print(x)"
    verdict = judge(
        any_level, code, read_tests({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}), LIMITS
    )
    faults = {
        "wrong": ProgramOutcome.FAILED,
        "killed": ProgramOutcome.KILLED,
        "huge": ProgramOutcome.OUT_OF_MEMORY,
    }
    assert (verdict.outcome, verdict.num_passed, verdict.num_run) == (faults[printed], 2, 3)
    assert verdict.reason.startswith("test 2 of 3: ")


TOTAL = "def total(items): return sum(items)"


@pytest.mark.parametrize(
    ("outputs", "code", "passed"),
    [
        ([[6], [3]], TOTAL, 2),
        ([[6], [3]], TOTAL.replace("sum(items)", "[sum(items)]"), 2),
        ([[6], [3]], "def total(items): return 6 if len(items) > 2 else [3]", 1),
        ([[6], 3], TOTAL, 1),
        ([[6], [3, 0]], TOTAL, 0),
        ([[[6]], [[3]]], TOTAL, 0),
        ([[[6]], [[3]]], TOTAL.replace("sum(items)", "[sum(items)]"), 2),
        ([["6"], ["3"]], TOTAL, 0),
    ],
)
def test_values_that_are_all_in_lists_of_one_are_read_either_way_and_never_both(
    bare: Sandbox, outputs: list[object], code: str, passed: int
) -> None:
    tests = read_tests({"fn_name": "total", "inputs": [[[1, 2, 3]], [[1, 2]]], "outputs": outputs})
    assert judge(bare, code, tests, LIMITS).num_passed == passed


def test_printed_values_in_lists_of_one_are_lines(bare: Sandbox) -> None:
    tests = read_tests({"inputs": [["3", "1 2"]], "outputs": [["0.50"]]})
    assert judge(bare, "input(); print(.5 * len(input().split()) / 2)", tests, LIMITS).num_passed == 1


def test_a_signal_to_every_process_ends_no_sandbox_and_programs_have_signals_as_usual() -> None:
    before = {*process.children(os.getpid())}
    with closing(Sandbox("limits", strongest="limits")) as sandbox:
        (warm,) = {*process.children(os.getpid())} - before
        for number in zygote.SIGNALS:
            os.kill(warm, number)
        code = (
            "import signal\ndef f(): return [signal.getsignal(n) == signal.SIG_DFL for n in (1, 10, 12, 15)]"
        )
        assert sandbox.call(code, "f", [[]], LIMITS).answers == [CallAnswer([True] * 4)]
