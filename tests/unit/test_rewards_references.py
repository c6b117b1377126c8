"""Reference answers as data files hold them, and what equals them."""

from __future__ import annotations

import datetime
import json
import math
import uuid
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from millrace.core.errors import DataError
from millrace.rewards.exact_reward import ExactReward
from millrace.tasks.chat import find_reference
from millrace.tasks.rows import open_rows

MOMENT = datetime.datetime(2024, 5, 1, 12, 30)


def score(answer, completion, answer_is="one", **more):
    return ExactReward(None, answer_is=answer_is, **more)(completion, answer, {})


# ---------------------------------------------------------------- one value


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (18, ["18", "18.0", " 18 "], ["18 apples", "1_8", "19", "eighteen", "", "١٨"]),
        (18.0, ["18", "18.0", "1.8e1"], ["18.1", "nan", ".18"]),
        (-0.5, ["-0.5", "-.5", "-0.50"], ["0.5", "-1/2"]),
        (1e22, ["1e22", "1" + "0" * 22], ["1e21", "1e99999999"]),
        (float(np.float32(0.1)), ["0.1"], ["0.2"]),
        (np.float32(0.1), ["0.1"], ["0.11"]),
        (np.int64(7), ["7"], ["8"]),
        (np.array(7), ["7"], ["8"]),
        (np.str_("Paris"), ["Paris"], ["paris"]),
        (Decimal("12.50"), ["12.5", "12.50"], ["12.51"]),
        (True, ["true", "True"], ["1", "false", "yes"]),
        (np.bool_(False), ["false", "False"], ["0", "true"]),
        (datetime.date(2024, 5, 1), ["2024-05-01"], ["1 May 2024"]),
        (MOMENT, ["2024-05-01 12:30:00", "2024-05-01T12:30:00"], ["2024-05-01"]),
        (datetime.datetime(2024, 5, 1), ["2024-05-01", "2024-05-01 00:00:00"], ["2024-05-02"]),
        (datetime.time(12, 30), ["12:30:00"], ["12:31:00"]),
        ("18.0", ["18.0"], ["18"]),  # text is compared as text
        (" Paris\n", ["Paris"], ["paris", "Paris."]),
        (2**80, [str(2**80)], [str(2**80 + 1)]),
    ],
)  # fmt: skip
def test_a_value_equals_each_plain_way_to_write_it_and_nothing_else(answer, right, wrong):
    assert [score(answer, text) for text in right] == [1.0] * len(right)
    assert [score(answer, text) for text in wrong] == [0.0] * len(wrong)


ONE = {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}
OF_IFEVAL = [  # of allenai's RLVR-IFeval and IF_multi_constraints, as text and as data
    '{"func_name": "validate_lowercase", "N": null, "quantifier": null, "end_phrase": null}',
    {"func_name": "verify_paragraph_count", "N": 3, "quantifier": None},
    "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
    json.dumps([ONE]),
    [ONE, ONE],
    [{"instruction_id": "keywords:existence", "kwargs": {"keywords": ["cat"]}}],
]


@pytest.mark.parametrize("reward", [ExactReward(None, answer_is=kind) for kind in ("one", "any", "json")])
@pytest.mark.parametrize("answer", OF_IFEVAL)
def test_instructions_are_no_answer_however_it_is_read(reward, answer):
    with pytest.raises(DataError, match="IFEval"):
        reward("x", answer, {})


@pytest.mark.parametrize(
    "answer", ['{"func_name": "validate_user", "arguments": {"N": 1}}', "'instruction_id': 3"]
)
def test_a_call_of_a_function_is_an_answer(answer):
    assert score(answer, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["Paris", "City of Paris"], r'a list: \[\'Paris\', .*`reward.answer_is` to "any"'),
        (["Paris"], "a list"),
        ([], "a list"),
        (("Paris",), "a list"),
        ({"Paris"}, "a list"),
        (np.array(["Paris", "Lyon"]), "a list"),
        ({"value": "Paris", "aliases": ["City of Paris"]}, "a table with the keys value, aliases: name one"),
        (math.nan, "has none"),
        (np.float32("nan"), "has none"),
        (None, "has none"),
        (math.inf, "no finite number"),
        (Decimal("inf"), "no finite number"),
        (Fraction(1, 2), "a Fraction"),
        (b"Paris", "a bytes, which no text equals"),
        (1j, "a complex"),
        (uuid.UUID(int=1), "a UUID"),
        (datetime.timedelta(1), "a timedelta"),
        ("", "is empty"),
        (" \n", "is empty"),
        *[(answer, "instructions .IFEval.*reward function") for answer in OF_IFEVAL],
    ],
)
def test_what_no_completion_could_equal_is_an_error_and_never_a_zero(answer, message):
    with pytest.raises(DataError, match=message):
        score(answer, "Paris")


def test_a_number_may_hold_what_a_pattern_finds():
    assert ExactReward(None, r"(\d+)")("18", 18.0, {}) == 1.0


# ---------------------------------------------------------------- several accepted answers


@pytest.mark.parametrize(
    "answer",
    [
        ["Paris", "City of Paris"],
        ("City of Paris", "Paris"),
        np.array(["Paris", "Lyon"], dtype=object),
        "Paris",
    ],
)
def test_each_of_the_accepted_answers_is_right(answer):
    assert score(answer, "Paris", "any") == 1.0
    assert score(answer, "London", "any") == 0.0


def test_accepted_numbers_and_truth_values_equal_their_writings():
    assert score([18.0, True, "x"], "18", "any") == score([18.0, True], "True", "any") == 1.0
    assert ExactReward(None, "#### (.+)", "any")("72", ["a #### 72", "b #### 73"], {}) == 1.0


@pytest.mark.parametrize(
    "answer", [[], [["Paris"]], [{"text": "Paris"}], ["Paris", None], {"text": ["Paris"]}]
)
def test_a_list_that_is_no_list_of_answers_is_an_error(answer):
    with pytest.raises(DataError):
        score(answer, "Paris", "any")


# ---------------------------------------------------------------- a value of JSON


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ([1, 2, 3], ["[1, 2, 3]", "[1,2.0,3]\n"], ["[1, 3, 2]", "1, 2, 3", "[1, 2]", ""]),
        ("[1, 2]", ["[1,2]"], ["[2,1]"]),
        ({"a": 1, "b": None}, ['{"a": 1}', '{"b": null, "a": 1.0}'], ['{"a": true}', '{"a": 1, "b": 2}']),
        ({"x": [{"y": 0.5}]}, ['{"x": [{"y": 0.50}]}'], ['{"x": {"y": 0.5}}']),
        (["Paris"], ['["Paris"]'], ["Paris", '["paris"]']),
        (True, ["true"], ["1", "True"]),
        ("Paris", ["Paris", '"Paris"'], ["paris"]),
        (np.array([[1, 2], [3, 4]]), ["[[1,2],[3,4]]"], ["[[1,2],[3,5]]"]),
    ],
)
def test_a_list_or_a_table_may_be_the_answer_itself(answer, right, wrong):
    assert [score(answer, text, "json") for text in right] == [1.0] * len(right)
    assert [score(answer, text, "json") for text in wrong] == [0.0] * len(wrong)


def test_a_value_that_json_has_not_is_an_error():
    with pytest.raises(DataError, match="JSON has no such value"):
        score([b"x"], "x", "json")


def test_a_text_of_a_hundred_thousand_brackets_is_wrong():
    assert score([1], "[" * 100_000, "json") == 0.0


# ---------------------------------------------------------------- files


def test_numbers_lists_and_tables_of_parquet_are_read_as_they_are(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [
        {"gap": 18, "aliases": ["Paris", "City of Paris"], "table": {"value": "Paris"}, "day": "2024-05-01"},
        {"gap": None, "aliases": [], "table": {"value": "Lyon"}, "day": None},
    ]
    frame = pandas.DataFrame(rows)
    frame["day"] = pandas.to_datetime(frame["day"])
    frame.to_parquet(tmp_path / "rows.parquet")
    read = open_rows(str(tmp_path / "rows.parquet"))
    first, second = read[0], read[1]
    assert score(find_reference(first, "gap"), "18") == 1.0
    assert find_reference(second, "gap") is None and find_reference(second, "day") is None
    assert score(find_reference(first, "aliases"), "City of Paris", "any") == 1.0
    assert score(find_reference(first, "table.value"), "Paris") == 1.0
    assert score(find_reference(first, "day"), "2024-05-01") == 1.0


def test_the_nan_of_a_gap_in_json_is_no_answer(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"answer": math.nan}) + "\n")
    assert find_reference(open_rows(str(tmp_path / "rows.jsonl"))[0], "answer") is None
