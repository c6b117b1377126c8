"""The row that is scored is the row that was asked."""

import asyncio
import datetime
import json
import string
from decimal import Decimal

import numpy as np
import pytest
from msgspec.structs import replace

from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.types import Failed, Finish, Prompt, Scored, ScoreRequest
from millrace.episodes.reward_worker import TaskRewardWorker
from millrace.tasks.asked_row import row_digest

ROWS = """
import itertools, pathlib
{above}
def rows():
    return [{{"prompt": f"{{n}} =", "answer": str(n), "tags": {{"a", "b"}}, "parts": [[n]]}} for n in order()]
def order():
    return {order}
def reward(completion, answer, parts, **columns):
    parts[0].append(1)
    parts.append(2)
    return float(completion == answer)
"""


@pytest.fixture
def worker_of(tmp_path):
    make_character_tokenizer(tmp_path / "model", string.printable)
    encode = load_tokenizer(tmp_path / "model").encode

    def make(order="[1, 2, 3]", task=None, above=""):
        own = tmp_path / f"own{len(list(tmp_path.iterdir()))}.py"
        own.write_text(ROWS.format(order=order, above=above))
        config = {
            "model": {"path": str(tmp_path / "model")},
            "task": task or {"kind": "function", "path": f"{own}:rows"},
            "reward": {"kind": "function", "path": f"{own}:reward"},
        }
        return TaskRewardWorker(config, limit_memory=False)

    make.encode = encode
    return make


def prompt_of(worker, group_id=0) -> Prompt:
    return asyncio.run(worker.prompts([group_id]))[0]


def score_of(worker, prompt, completion, tokens):
    request = ScoreRequest(0, prompt.group_id, tokens(completion), Finish.STOP, row_digest=prompt.row_digest)

    async def first():
        [(_, score)] = [pair async for pair in worker.score([request])]
        return score

    return asyncio.run(first())


def test_a_row_that_is_another_one_than_was_asked_fails_and_is_never_scored(worker_of):
    prompt = prompt_of(worker_of("[1, 2, 3]"))
    other = worker_of("[4, 5, 6]")
    wrong = score_of(other, prompt, prompt.text[0], worker_of.encode)
    assert isinstance(wrong, Failed) and "another row than when its prompt was made" in wrong.reason
    assert "rows:1 is" in wrong.reason
    unknown = replace(prompt, row_digest="")  # of a run that began before rows had digests
    assert score_of(other, unknown, "1", worker_of.encode) == Scored(0.0)


def test_the_same_row_of_another_worker_is_scored(worker_of):
    prompt = prompt_of(worker_of())
    assert score_of(worker_of(), prompt, prompt.text[0], worker_of.encode) == Scored(1.0)


def test_a_reward_that_changes_its_row_changes_its_own_copy_alone(worker_of):
    worker = worker_of()
    prompt = prompt_of(worker)
    scores = [score_of(worker, prompt, prompt.text[0], worker_of.encode) for _ in range(3)]
    assert scores == [Scored(1.0)] * 3


def test_a_changed_answer_is_another_row_though_the_question_is_the_same(worker_of, tmp_path):
    file = tmp_path / "rows.jsonl"

    def worker(answer):
        file.write_text(json.dumps({"prompt": "2 + 2 =", "answer": answer, "parts": [[1]]}) + "\n")
        return worker_of(task={"kind": "file", "path": str(file)})

    prompt = prompt_of(worker("4"))
    assert isinstance(score_of(worker("5"), prompt, "5", worker_of.encode), Failed)
    assert score_of(worker("4"), prompt, "4", worker_of.encode) == Scored(1.0)


EQUAL = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": {"x", "y", "z"}}, {"a": {"z", "y", "x"}}),
    ({"a": object()}, {"a": object()}),
    ({"a": [1, (2, 3)]}, {"a": [1, [2, 3]]}),
    ({"a": float("nan")}, {"a": float("nan")}),
    ({(1, 2): {3: frozenset("abc")}}, {(1, 2): {3: frozenset("cba")}}),
    ({"a": np.arange(3)}, {"a": np.arange(3)}),
]
DIFFERENT = [
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"a": "1"}),
    ({"a": True}, {"a": 1}),
    ({"a": None}, {}),
    ({"a": [1, 2]}, {"a": [2, 1]}),
    ({"a": ["1, 2"]}, {"a": ["1", "2"]}),
    ({"a": "\ud800"}, {"a": "\ud801"}),
    ({"a": Decimal("1.0")}, {"a": Decimal("1.00")}),
    ({"a": datetime.date(2026, 1, 1)}, {"a": datetime.date(2026, 1, 2)}),
    ({"a": np.zeros(2)}, {"a": np.ones(2)}),
    ({"a": np.zeros(2, "int32")}, {"a": np.zeros(2, "int64")}),
    ({"a": b"1"}, {"a": "1"}),
    ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_columns_have_equal_digests(one, other):
    assert row_digest(one) == row_digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_columns_have_another_digest(one, other):
    assert row_digest(one) != row_digest(other)
