"""When what a program gave is what the tests expect."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_tests import CodeTests, is_equal, prints_the_same, read_tests

SAME = [
    ("0.500000", "0.5"),
    ("0.50", "0.5"),
    ("5.0", "5"),
    ("4.9999999999", "5"),
    ("0.333333", "0.333333333333"),
    ("1e-3", "0.001"),
    ("1E5", "100000.0"),
    (".5", "0.5"),
    ("-0.0", "0.0"),
    ("1000000.4", "1000000.5"),
    ("0.0000000", "0.00000012"),
    ("YES 1.50\n\n", "YES 1.5"),
    ("1  2 \n 3\n", "1 2\n3"),
    ("3\n", "\n3\n\n"),
    ("9" * 5000 + ".0", "9" * 5000),
]
OTHER = [
    ("0.51", "0.5"),
    ("7", "007"),
    ("7.0", "007"),
    ("007", "7.0"),
    ("5", "+5"),
    ("1000", "1,000"),
    ("1000000008", "1000000007"),
    ("1000000008.0", "1000000007"),
    ("1.2345678901234568e+29", "123456789012345678901234567890"),
    ("0.34", "0.33"),
    ("nan", "0.5"),
    ("inf", "1e400"),
    ("0x10", "16"),
    ("1_0", "10"),
    ("٣", "3"),
    ("1 2", "1\n2"),
    ("1", "1 2"),
    ("yes", "YES"),
    ("0.5", "0.5\n0.5"),
    ("1e9999", "1e9998"),
    ("", "0"),
]


@pytest.mark.parametrize(("printed", "expected"), SAME)
def test_printed_words_that_are_numbers_are_compared_as_numbers(printed: str, expected: str) -> None:
    assert prints_the_same(printed, expected)


@pytest.mark.parametrize(("printed", "expected"), OTHER)
def test_other_numbers_and_texts_in_which_each_character_counts_differ(printed: str, expected: str) -> None:
    assert not prints_the_same(printed, expected)


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1 / 3, 0.33333333, True),
        (0.5000004, 0.5, True),
        (0.1 + 0.2, 0.3, True),
        (2.0, 2, True),
        (2, 2.0, True),
        (2.0000000001, 2, True),
        (1e-17, 0.0, True),
        (0.501, 0.5, False),
        (1e-7, 1e-8, False),
        (1000000008.0, 1000000007, False),
        (1000000008, 1000000007, False),
        (10.0**17, 10**17 + 1, False),
        (10.0**17, 10**17, True),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        ("0.50", "0.5", False),
        (True, 1.0, False),
        ([0.33333333], [1 / 3], True),
    ],
)
def test_returned_numbers_may_differ_by_a_millionth(value: Any, expected: Any, equal: bool) -> None:
    assert is_equal(value, expected) is equal


FORMS = [
    ({"inputs": [["2", "1 2"]], "outputs": [["1", "2"]]}, CodeTests(None, ["2\n1 2"], ["1\n2"])),
    ({"inputs": ["1"], "outputs": [3]}, CodeTests(None, ["1"], ["3"])),
    ({"input": ["1 2\n"], "output": ["3\n"]}, CodeTests(None, ["1 2\n"], ["3\n"])),
    ('[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]', CodeTests(None, ["1 2\n"], ["3\n"])),
    (
        [{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}],
        CodeTests("f", [[[1, 2], "x"]], [[3]]),
    ),
    ({"inputs": ["[1]\n2"], "outputs": [3], "fn_name": "f"}, CodeTests("f", [[[1], 2]], [3])),
    ({"inputs": [[1]], "outputs": [3], "fn_name": "Solution().f"}, CodeTests("f", [[1]], [3])),
    ({"inputs": [[1]], "outputs": [3], "fn_name": "Solution.f"}, CodeTests("f", [[1]], [3])),
    ({"inputs": ["1"], "outputs": ["3"], "fn_name": ""}, CodeTests(None, ["1"], ["3"])),
    (
        [{"input": "1", "output": "3", "testtype": "functional", "metadata": '{"func_name": "f"}'}],
        CodeTests("f", [[1]], [3]),
    ),
    ([{"input": [1], "output": [3], "type": "function_call", "fn_name": "f"}], CodeTests("f", [[1]], [[3]])),
    ([{"input": [1], "output": 3, "type": "function_call", "fn_name": "f"}], CodeTests("f", [[1]], [3])),
    ({"inputs": ((1,),), "outputs": ((3,),), "fn_name": "f"}, CodeTests("f", [[1]], [(3,)])),
]


@pytest.mark.parametrize(("column", "tests"), FORMS)
def test_tests_are_read_in_the_forms_of_public_data_sets(column: Any, tests: CodeTests) -> None:
    assert read_tests(column) == tests


def test_the_metadata_of_a_row_name_the_function_of_its_tests() -> None:
    called = '[{"input": "1", "output": "3", "testtype": "functional"}]'
    printed = '[{"input": "1", "output": "3", "testtype": "stdin"}]'
    for metadata in ({"func_name": "f"}, '{"func_name": "f"}'):
        assert read_tests(called, columns={"metadata": metadata}) == CodeTests("f", [[1]], [3])
        assert read_tests(printed, columns={"metadata": metadata}) == CodeTests(None, ["1"], ["3"])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([{"input": "1", "output": "3", "testtype": "functional"}], "nothing names it"),
        ([{"input": "1"}], 'each test needs "input" and "output"'),
        (
            [{"input": "1", "output": "x", "testtype": "functional", "fn_name": "f"}],
            "an output of the tests is no JSON",
        ),
        (
            {"inputs": ["x y"], "outputs": [3], "fn_name": "f"},
            "an input of the tests is a line that is no JSON",
        ),
        ({"inputs": ["1"], "outputs": [{"a": 1}]}, "a text or a list of lines"),
        ({"inputs": [[[1]]], "outputs": ["1"]}, "a text or a list of lines"),
    ],
)
def test_tests_that_no_form_explains_are_refused_in_words(column: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_tests(column)
