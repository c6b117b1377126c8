"""What an evaluation makes of scores."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from millrace.config.schema import Config
from millrace.core.completion.columns import token_array
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Abstain, BadPrompt, Failed, Finish, Prompt, Scored, ScoreRequest
from millrace.estimates.evaluation import Attempt, powers_of_two, summarize
from millrace.evaluation import scoring
from millrace.evaluation.evaluate import _attempts, evaluate
from millrace.evaluation.generate import Completion
from millrace.evaluation.scoring import Timed

SUMS = {
    "model": {"path": "m"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}


def attempt(value: float | None, *, truncated: bool = False) -> Attempt:
    return Attempt(Failed("no") if value is None else Scored(value), truncated)


def test_accuracies_rewards_and_truncation_are_shares() -> None:
    result = summarize(
        "m",
        [attempt(1.0), attempt(0.0)],
        [[attempt(1.0), attempt(0.5, truncated=True)], [attempt(0.0), attempt(0.0)]],
        correct_at=1.0,
    )
    assert result.greedy_accuracy == 0.5
    assert result.sampled_accuracy == 0.25
    assert result.reward_mean == 0.375
    assert result.truncated_share == pytest.approx(1 / 6)
    assert result.pass_at_k == {1: 0.25, 2: 0.5}


def test_what_counts_as_correct_is_the_callers_threshold() -> None:
    assert summarize("m", [attempt(0.5)], [[attempt(0.5)]], correct_at=0.5).sampled_accuracy == 1.0


def test_a_failed_reward_is_left_out_and_counted_not_made_a_zero() -> None:
    sampled = [[attempt(1.0), attempt(None)], [attempt(1.0), attempt(1.0)]]
    result = summarize("m", [attempt(None), attempt(1.0)], sampled, correct_at=1.0)
    assert result.sampled_accuracy == 1.0
    assert result.greedy_accuracy == 1.0
    assert result.reward_mean == 1.0
    assert result.num_unscored == 2
    assert result.pass_at_k == {1: 1.0, 2: 1.0}  # pass@2 over the one prompt with two scores


def test_the_estimate_and_its_interval_weigh_prompts_alike() -> None:
    """A prompt whose other samples have no reward counts as much as a prompt whose samples all have one."""
    sampled = [[attempt(1.0)] * 32, *([[attempt(0.0), *[attempt(None)] * 31]] * 9)]
    result = summarize("m", [attempt(0.0)] * 10, sampled, correct_at=1.0)
    assert result.sampled_accuracy == result.reward_mean == result.pass_at_k[1] == 0.1
    for name in ("sampled_accuracy", "reward_mean"):
        low, high = result.intervals[name]
        assert low <= getattr(result, name) <= high


def test_completions_without_an_answer_do_not_vote_together() -> None:
    """Of 4 completions three say nothing, and one is right: it is the only vote, wherever it is drawn."""
    row = [Attempt(Scored(1.0, {}, "42"), False), *[Attempt(Scored(0.0, {}, ""), True)] * 3]
    result = summarize("m", [row[0]], [row], correct_at=1.0)
    assert result.majority_at_k == {1: 0.25, 2: 0.5, 4: 1.0}


def test_a_completion_shorter_than_its_budget_is_truncated_where_the_engine_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ScoreRequest] = []

    def score(config: Config, requests: list[ScoreRequest], *, answers: bool) -> list[Timed]:
        asked.extend(requests)
        return [Timed(Scored(1.0), 0.0) for _ in requests]

    monkeypatch.setattr("millrace.evaluation.scoring.scores", score)
    config = Config.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    )
    prompt = Prompt(7, "row-7", token_array([1, 2]), "ab")
    completions = [[Completion([3, 4], Finish.LENGTH), Completion([3], Finish.STOP)]]
    [row] = _attempts(config, [prompt], completions)
    assert [one.truncated for one in row] == [True, False]
    assert [(one.group_id, one.finish) for one in asked] == [(7, Finish.LENGTH), (7, Finish.STOP)]


def test_an_abstention_has_no_reward() -> None:
    assert Attempt(Abstain(), False).reward is None


def test_a_mean_of_nothing_is_null_in_json() -> None:
    result = summarize("m", [attempt(None)], [[attempt(None)]], correct_at=1.0)
    assert math.isnan(result.reward_mean)
    tree = json.loads(json.dumps(result.to_json(), allow_nan=True))
    assert tree["reward_mean"] is None
    assert tree["pass_at_k"] == {"1": None}


def test_pass_at_k_is_asked_at_powers_of_two_and_at_the_end() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4, 6]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(0) == []


def test_a_gpu_that_is_not_there_is_refused_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.model_validate(SUMS | {"model": {"path": "m", "device": "cuda:99"}})
    monkeypatch.setattr("millrace.evaluation.scoring.prompts", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(ConfigError, match=r"`model.device` \('cuda:99'\) cannot be used here"):
        evaluate(config, prompts=1, samples=1)


class _RowsOneInFifty:
    """A reward worker that makes a prompt of each fiftieth of `rows` rows."""

    def __init__(self, rows: int, takes_s: float = 0.0) -> None:
        self._rows, self._takes_s = rows, takes_s

    async def call(self, _: str, group_ids: list[int], *, timeout_s: float) -> list[Prompt | BadPrompt]:
        await asyncio.sleep(self._takes_s)
        rows = ((group_id, str(group_id % self._rows)) for group_id in group_ids)
        return [
            BadPrompt(*row, "null") if row[0] % 50 < 49 else Prompt(*row, token_array(), "") for row in rows
        ]


@pytest.mark.parametrize(("rows", "usable"), [(500, 3), (100, 2)])
def test_rows_that_cannot_be_used_are_passed_over_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch, rows: int, usable: int
) -> None:
    async def started(*_: object) -> _RowsOneInFifty:
        return _RowsOneInFifty(rows)

    monkeypatch.setattr(scoring, "start_worker", started)
    assert [one.group_id for one in scoring.prompts(Config.model_validate(SUMS), 3)] == [49, 99, 149][:usable]


def test_rows_that_are_refused_after_long_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*_: object) -> _RowsOneInFifty:
        return _RowsOneInFifty(500, takes_s=0.02)

    monkeypatch.setattr(scoring, "start_worker", started)
    config = Config.model_validate(SUMS)
    short = config.supervision.model_copy(update={"spawn_timeout_s": 0.01})
    with pytest.raises(DataError, match="only 0 of 6 prompts can be used"):
        scoring.prompts(config.model_copy(update={"supervision": short}), 3)


def test_a_task_without_a_usable_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*_: object) -> _RowsOneInFifty:
        return _RowsOneInFifty(40)

    monkeypatch.setattr(scoring, "start_worker", started)
    with pytest.raises(DataError, match=r"only 0 of .* prompts can be used"):
        scoring.prompts(Config.model_validate(SUMS), 3)
