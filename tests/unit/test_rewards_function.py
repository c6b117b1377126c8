"""Functions as rewards: attempts of one that is flaky, and the signatures of TRL and verl."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from millrace.config.tables.task import FileTaskSection, FunctionRewardSection
from millrace.core.errors import DeadlineExceeded, RewardError
from millrace.core.types import Abstain, Failed, Scored
from millrace.rewards.reward_calls import make_calls
from millrace.rewards.scores import PAUSE_S_MAX, pauses_s
from millrace.tasks.tasks import make_task

CODE = """
import time
calls = []

def flaky(completion):
    calls.append(completion)
    if len(calls) < 3:
        raise OSError("busy")
    return 1.0

async def later(completion):
    return flaky(completion)

def never(completion):
    raise OSError("gone")

def slow(completion):
    time.sleep(4)
    raise ValueError("slow")

def hangs(completion):
    time.sleep(1)

def lengths(completions, **kwargs):
    return [float(len(one)) for one in completions]

def chat(prompts, completions, solution):
    (prompt,), (said,), (right,) = prompts, completions, solution
    return [float(said == [{"role": "assistant", "content": right}] and prompt[0]["role"] == "user")]

async def no_opinion(completions, prompts=None):
    return [None]

def number(completions):
    return 1.0

def needs_ids(completions, completion_ids):
    return [0.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = data_source == "sums" and solution_str == ground_truth and extra_info == {"index": 3}
    return {"score": float(found), "length": len(solution_str)}

def without_score(solution_str, ground_truth):
    return {"acc": 1.0}
"""
ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "2 + 2 ="}],
    "solution": "4",
    "data_source": "sums",
    "extra_info": {"index": 3},
}


@pytest.fixture
def score(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW | {"prompt": "2 + 2 ="}) + "\n")
    (tmp_path / "own.py").write_text(CODE)
    task = make_task(FileTaskSection(path=str(tmp_path / "rows.jsonl"), answer="solution"), None)

    def scored(name: str, completion: str = "4", **keys: Any):
        config = FunctionRewardSection(path=f"{tmp_path / 'own.py'}:{name}", **keys)
        return asyncio.run(make_calls(config, task, None).score(completion, "4", ROW))

    return scored


# ---------------------------------------------------------------- attempts


@pytest.mark.parametrize("name", ["flaky", "later"])
def test_a_function_that_fails_is_called_again_and_its_attempts_are_a_metric(score, name):
    assert score(name, attempts=3, backoff_s=0.001) == Scored(1.0, {"attempts": 3.0})


def test_the_last_attempts_failure_is_that_of_the_trajectory(score):
    assert isinstance(score("flaky"), Failed)
    failed = score("never", attempts=2, backoff_s=0.001)
    assert "OSError: gone" in failed.reason and failed.reason.endswith("(attempt 2 of 2)")


def test_no_pause_reaches_beyond_the_deadline_of_all_attempts(score):
    failed = score("never", attempts=9, backoff_s=100.0)
    assert failed.reason.endswith("(attempt 1 of 9, and there is no time for the next)")


def test_no_attempt_begins_that_would_end_after_the_deadline_if_it_took_as_long_as_the_last(score):
    failed = score("slow", attempts=9, backoff_s=0.001, timeout_s=7.9)
    assert "ValueError: slow" in failed.reason
    assert failed.reason.endswith("(attempt 1 of 9, and there is no time for the next)")


def test_a_call_beyond_the_deadline_ends_its_process_and_is_not_repeated(score):
    with pytest.raises(DeadlineExceeded):
        score("hangs", attempts=5, backoff_s=0.001, timeout_s=0.05)


def test_pauses_double_with_jitter_that_depends_on_the_completion_alone():
    pauses = list(pauses_s("text", 9, 1.0))
    assert pauses == list(pauses_s("text", 9, 1.0)) != list(pauses_s("other", 9, 1.0))
    assert all(0.5 * 2**i <= pause <= 1.5 * 2**i for i, pause in enumerate(pauses[:5]))
    assert len(pauses) == 8 and max(pauses) == PAUSE_S_MAX and any(a < b for a, b in pairwise(pauses))
    assert list(pauses_s("\ud800", 1, 1.0)) == []


# ---------------------------------------------------------------- signatures


def test_a_function_of_trl_gets_lists_of_one_and_messages_where_the_prompt_has_messages(score):
    assert score("chat", signature="trl") == Scored(1.0)
    assert score("lengths", signature="trl") == Scored(1.0), "one message"
    assert score("chat", "5", signature="trl") == Scored(0.0)


def test_none_of_a_function_of_trl_is_no_opinion_and_a_lone_number_is_a_failure(score):
    assert isinstance(score("no_opinion", signature="trl"), Abstain)
    failed = score("number", signature="trl")
    assert isinstance(failed, Failed) and "returns a list with one number" in failed.reason


def test_a_function_of_verl_gets_the_reference_and_its_columns(score):
    assert score("compute_score", signature="verl") == Scored(1.0, {"length": 1.0})
    assert score("compute_score", "5", signature="verl").value == 0.0
    assert "returns a dict with `score`" in score("without_score", signature="verl").reason


@pytest.mark.parametrize(
    ("name", "signature", "said"),
    [
        ("lengths", "millrace", r'takes `completions`, as .* of trl .*\n.* `reward.signature` to "trl"'),
        ("compute_score", "millrace", r'takes `solution_str`.*\n.* `reward.signature` to "verl"'),
        ("compute_score", "trl", r'takes `solution_str`.*\n.* `reward.signature` to "verl"'),
        ("needs_ids", "trl", "needs `completion_ids`, which nothing provides"),
        (
            "never",
            "verl",
            r"needs `completion`, which nothing provides\. Offered, .*: data_source, extra_info, ",
        ),
    ],
)
def test_a_function_of_another_signature_is_refused_and_the_key_is_named(score, name, signature, said):
    with pytest.raises(RewardError, match=said):
        score(name, signature=signature)
