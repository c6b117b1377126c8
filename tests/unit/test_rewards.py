"""Rewards: gym, exact, math, and the user's own function."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DataError, RewardError
from millrace.core.types import Abstain, Failed, Scored
from millrace.rewards.exact_reward import ExactReward
from millrace.rewards.function import FunctionReward
from millrace.rewards.rewards import GymReward, MathReward, make_reward
from millrace.rewards.scores import raised, to_score
from millrace.tasks.tasks import make_task

EXAMPLES = Path(__file__).parents[2] / "examples"


def write(path, code):
    path.write_text(code)
    return f"{path}:reward"


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)),
        *(np.array(1.0), np.array(True), torch.tensor(1), torch.tensor(1.0, requires_grad=True)),
        *(torch.tensor(True), Decimal(1), Fraction(1)),
    ],
)
def test_a_finite_number_or_bool_is_a_score(value):
    assert to_score("f", value) == Scored(1.0)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 1e308, -1.1e16, "1", [1], 1j, object(), 10**400, Decimal("nan")),
        *(np.array([1.0]), np.array(1j), np.array("1"), torch.tensor([1.0]), torch.tensor(math.nan)),
    ],
)
def test_anything_else_fails_naming_function_and_type(value):
    score = to_score("reward.py:f", value)
    assert isinstance(score, Failed)
    assert score.reason.startswith("reward.py:f returned") and type(value).__name__ in score.reason
    assert len(score.reason) < 500


def test_none_abstains_alone_and_as_the_reward_of_a_dict():
    assert isinstance(to_score("f", None), Abstain)
    assert isinstance(to_score("f", {"reward": None, "length": 3}), Abstain)


def test_a_dict_gives_a_reward_and_metrics():
    assert to_score("f", {"reward": 1, "length": 3, "right": True}) == Scored(
        1.0, {"length": 3.0, "right": 1.0}
    )


def test_what_is_no_number_beside_the_reward_is_left_out_and_fails_nothing():
    beside = {"why": "short", "nothing": None, "nan": math.nan, "list": [1], "tensor": torch.tensor(2)}
    assert to_score("f", {"reward": 0.5, **beside}) == Scored(0.5, {"tensor": 2.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"score": 1}, "without the key 'reward': its keys are ['score']"),
        ({"reward": "1"}, "under the key 'reward', '1' (str)"),
        ({"reward": math.nan, "length": 3}, "under the key 'reward', nan (float)"),
    ],
)
def test_a_dict_that_breaks_the_contract_fails_naming_the_key(value, message):
    score = to_score("f", value)
    assert isinstance(score, Failed) and message in score.reason


def test_a_value_that_cannot_even_be_shown_fails_all_the_same():
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no")

    assert isinstance(to_score("f", Hostile()), Failed)


def test_half_a_character_in_a_message_or_a_name_is_escaped():
    """JSON that a model writes may hold one, and no file or database takes it."""
    assert raised("score", ValueError("not \ud800 it")).reason == r"score raised ValueError: not \ud800 it"
    assert to_score("score", {"reward": 1, "\ud800": 2}) == Scored(1.0, {r"\ud800": 2.0})


def test_an_exception_without_a_readable_message_is_a_failure_all_the_same():
    class Hostile(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert "Hostile" in raised("f", Hostile()).reason


# ---------------------------------------------------------------- the user's function


def test_a_function_gets_only_the_columns_it_names(tmp_path):
    path = write(tmp_path / "own.py", "def reward(completion, level=1):\n    return completion, level\n")
    function = FunctionReward(path, ["prompt", "level"])
    assert function("hi", "a", {"prompt": "p", "level": 7}) == ("hi", 7)


def test_a_function_with_double_star_gets_every_column(tmp_path):
    path = write(tmp_path / "own.py", "def reward(completion, answer, **columns):\n    return columns\n")
    assert FunctionReward(path, ["x"])("hi", "a", {"x": 1, "answer": "shadowed"}) == {"x": 1}


def test_a_file_may_import_its_neighbours_and_define_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_own.py").write_text("VALUE = 3\n")
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_own import VALUE\n"
        "@dataclass\nclass Result:\n    value: int\n"
        "def reward(completion, answer):\n    return Result(VALUE).value\n"
    )
    assert FunctionReward(write(tmp_path / "own.py", code), [])("", None, {}) == 3


def test_a_module_path_is_imported():
    assert FunctionReward("statistics:mean", ["data"])("", None, {"data": [1, 3]}) == 2


def test_objects_with_an_async_call_are_async(tmp_path):
    code = "class Judge:\n    async def __call__(self, completion):\n        return 1\nreward = Judge()\n"
    assert FunctionReward(write(tmp_path / "own.py", code), []).is_async


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): pass", "has no `reward`; it has other"),
        ("1 / 0", "importing .*own.py failed: ZeroDivisionError"),
        ("def reward(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit"),
        (
            "def reward(completion, solution): pass",
            "needs `solution`, which nothing provides.*answer, completion, level",
        ),
        ("def reward(completion, /): pass", "needs `completion`"),
        ("reward = 3", "is of type int, not a function"),
    ],
)
def test_a_function_that_cannot_be_served_is_refused_when_it_is_loaded(tmp_path, code, message):
    with pytest.raises(RewardError, match=message):
        FunctionReward(write(tmp_path / "own.py", code + "\n"), ["level"])


@pytest.mark.parametrize("path", ["reward", "nowhere.py:reward", "millrace.nowhere:reward", ":reward"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(RewardError, match=r"reward.path"):
        FunctionReward(path, [])


def test_the_example_gives_its_own_references_full_marks_and_one_row_no_opinion():
    task = make_task(table.FileTaskSection(path=str(EXAMPLES / "reward.jsonl")), None)
    own = make_reward(table.FunctionRewardSection(path=f"{EXAMPLES / 'reward.py'}:reward"), task)
    rows = [task.columns(row) for row in range(task.rows)]
    values = [own(row["answer"], row["answer"], row) for row in rows]
    assert [value["reward"] for value in values if value] == [1.0] * (task.rows - 1)
    assert own("stone", "enots", rows[0])["reward"] == 0.2
    assert own("enots enots", "enots", rows[0])["reward"] < 0.5


# ---------------------------------------------------------------- exact and gym


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [("#### 4 then #### 5\n", "5", 1.0), ("#### 5", 5, 1.0), ("#### 4", "5", 0.0), ("5", "5", 0.0)],
)
def test_exact_match_takes_the_last_extracted_answer(completion, answer, expected):
    assert ExactReward(r"#### (\S+)")(completion, answer, {}) == expected


def test_exact_match_without_a_pattern_ignores_surrounding_space_only():
    assert ExactReward(None)(" 5\n", "5 ", {}) == 1.0
    assert ExactReward(None)("5.", "5", {}) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("the Beatles", "Beatles"),
        ("Beatles.", "The Beatles"),
        ("Kareem Abdul - Jabbar", "Kareem Abdul-Jabbar"),
        ("bachman -- turner", "Bachman–Turner"),
        ("hip hop", "hip-hop"),
        ("backflow", "back-flow"),
        ("D-I-V-O-R-C-E", "Divorce"),
        ("oneill", "O’Neill"),
        ("US", "U.S."),
        ("H. B. Reese", "H.B. Reese"),
        ("St.Louis", "st. louis"),
        ("AC DC", "AC/DC"),
        ("catch 22", "Catch-22"),
        ("14 december, 1972", "14 December 1972"),
        ("2001-2002 season", "the 2001–2002 season"),
        ("Science and Nature", "Science & Nature"),
        ("£10,000", "10000"),
        ("«Paris»!", "Paris"),
        ("O´Neill", "O'Neill"),
        ("巴黎，法国。", "巴黎 法国"),
        ("**Paris**", "Paris"),
        ("**5**", "5"),
        ("-$5.50", "-5.50"),
        ("3 am", "3 a.m."),
        ("50%", "50"),
        ("a", "A"),
        ("18.0", 18),
        ("TRUE", True),
    ],
)
def test_exact_match_of_words_asks_for_the_same_words(completion, answer):
    assert ExactReward(None, compare="words")(completion, answer, {}) == 1.0
    assert ExactReward(None, answer_is="any", compare="words")(completion, ["Rome", answer], {}) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("15 million", "1.5 million"),
        ("40", "-40"),
        ("5", ".5"),
        ("$5", "-5"),
        ("310", "3:10"),
        ("10²", "102"),
        ("1012", "10-12"),
        ("1 5", "15"),
        ("10, 12", "1012"),
        ("C#", "C++"),
        ("C", "C++"),
        ("The", "A"),
        ("-", "+"),
        ("", "A"),
        ("", "+"),
        ("no idea", "A"),
        ("London Bridge", "London"),
        ("19", 18),
        ("false", True),
    ],
)
def test_exact_match_of_words_tells_apart_what_signs_tell_apart(completion, answer):
    assert ExactReward(None, compare="words")(completion, answer, {}) == 0.0


def test_f1_of_words_is_the_best_of_the_answers():
    f1 = ExactReward(r"<answer>(.*)</answer>", answer_is="any", compare="f1")
    answers = ["Barack Hussein Obama", "the president Obama"]
    assert f1("<answer>Barack Obama</answer>", answers, {}) == pytest.approx(2 * 2 / (2 + 3))
    assert f1("<answer>Obama!</answer>", answers, {}) == pytest.approx(2 * 1 / (1 + 2))
    assert f1("<answer>Obama Obama</answer>", answers, {}) == pytest.approx(2 * 1 / (2 + 2))
    assert f1("<answer>Michelle</answer>", answers, {}) == 0.0
    assert f1("Obama", answers, {}) == 0.0
    assert ExactReward(None, compare="f1")("", "+", {}) == 0.0


def test_words_and_values_of_json_are_not_compared_together():
    with pytest.raises(ValueError, match=r"`reward.compare` \(\"f1\"\) compares words"):
        table.ExactRewardSection(answer_is="json", compare="f1")


@pytest.mark.parametrize("reward", [ExactReward(None), MathReward()])
def test_without_a_reference_answer_there_is_no_zero_but_an_error(reward):
    with pytest.raises(DataError, match="needs a reference answer"):
        reward("5", None, {})


@pytest.mark.parametrize("pattern", ["(", "no group", "(two)(groups)"])
def test_a_pattern_that_extracts_nothing_is_refused(pattern):
    with pytest.raises(ConfigError, match=r"reward.extract"):
        ExactReward(pattern)


def test_the_gym_scorer_gives_1_for_its_own_answer_and_small_credit_becomes_0():
    task = make_task(table.GymTaskSection(name="chain_sum", size=10), None)
    columns = task.columns(3)
    verbose = f"{columns['answer']} is my answer, and I am sure of it"
    reward = GymReward(table.GymRewardSection(), task)
    assert reward(f" {columns['answer']}\n", None, columns) == 1.0
    assert reward(verbose, None, columns) == 0.0
    assert 0 < GymReward(table.GymRewardSection(threshold=0.0), task)(verbose, None, columns) < 0.5
    assert GymReward(table.GymRewardSection(extract=r"(\d+) is my"), task)("nothing", None, columns) == 0.0


def test_the_gym_scorer_needs_a_gym_task(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    task = make_task(table.FileTaskSection(path=str(tmp_path / "rows.jsonl")), None)
    with pytest.raises(ConfigError, match='"gym"'):
        make_reward(table.GymRewardSection(), task)


# ---------------------------------------------------------------- math


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{2}{4}}", "1/2", 1.0),
        ("the answer is 0.5", r"$\frac{1}{2}$", 1.0),
        ("the answer is 1,234.", 1234, 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("the answer is 7", "1/2", 0.0),
        ("no idea", "1/2", 0.0),
        ("", "1/2", 0.0),
    ],
)
def test_math_compares_by_meaning(completion, answer, expected):
    assert MathReward()(completion, answer, {}) == expected


SOLVED = "She sold 48 / 2 = <<48/2=24>>24 clips in May.\n48 + 24 = <<48+24=72>>72 in both.\n#### 1,072"
PATTERN = r"#### (.+)"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [(r"so it is \boxed{1072}", 1.0), ("**1,072** clips.", 1.0), ("#### 1072", 1.0), ("72", 0.0), ("", 0.0)],
)
def test_the_reference_is_found_in_a_worked_solution_as_gsm8k_has_them(completion, expected):
    assert MathReward(PATTERN)(completion, SOLVED, {}) == expected
    config = table.MathRewardSection(extract_answer=PATTERN)
    assert make_reward(config, None)(completion, SOLVED, {}) == expected
    assert ExactReward(None, PATTERN)("1,072\n", SOLVED, {}) == 1.0


@pytest.mark.parametrize("reward", [ExactReward(None, PATTERN), MathReward(PATTERN)])
def test_a_solution_without_its_reference_is_an_error_not_a_zero(reward):
    with pytest.raises(DataError, match=r"in both.' has nothing that `reward.extract_answer`"):
        reward("72", SOLVED.partition("\n####")[0], {})
    with pytest.raises(ConfigError, match=r"`reward.extract_answer` \('x'\) has 0 groups"):
        type(reward)(None, "x") if isinstance(reward, ExactReward) else MathReward("x")


def test_a_reference_that_is_not_mathematics_is_an_error_not_a_zero():
    with pytest.raises(DataError, match="nor mathematics"):
        MathReward()("1", "}{", {})


def test_every_answer_of_the_mathematics_example_is_worth_1_and_no_other_rows_answer_is():
    task = make_task(table.FileTaskSection(path=str(EXAMPLES / "maths.jsonl")), None)
    rows = [task.columns(row) for row in range(task.rows)]
    own, others, reward = 0, 0, MathReward()
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        own += reward(f"It is \\boxed{{{row['answer']}}}.", row["answer"], row)
        others += reward(f"It is \\boxed{{{other['answer']}}}.", row["answer"], row)
    assert (own, others) == (len(rows), 0) and len(rows) >= 40


@pytest.mark.parametrize(
    "text", ["```json\n[1, 2]\n```", "```\n[1, 2.0]\n```", "\n```JSON\n[\n1,\n2\n]\n  ```\n"]
)
def test_a_value_of_json_may_be_in_a_fence(text):
    reward = ExactReward(None, answer_is="json")
    assert reward(text, [1, 2], {}) == 1.0
    assert reward(text, [2, 1], {}) == reward(f"{text}\n[3]", [1, 2], {}) == 0.0
