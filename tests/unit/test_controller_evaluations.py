"""What is due, what is kept, and when it is enough: from the ledger's position on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import Laminar
from millrace.controller.evaluation.evaluation_state import Evaluations
from millrace.controller.evaluation.prompt_attempt import PromptAttempt, next_turns
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.completion.marked import unmarked
from millrace.core.turns.turn_bounds import TurnBounds
from millrace.core.types import (
    EvaluationRecord,
    Failed,
    Finish,
    Observed,
    Progress,
    Prompt,
    Sampling,
    Scored,
)
from millrace.trainer.files.directories import prune_checkpoints
from millrace_sim.explore.worlds import small_config


def evaluations(*records: EvaluationRecord, version: int = 0, steps: int = 20, **keys: Any) -> Evaluations:
    section = EvaluationSection(**{"name": "a", "every": 2, "samples": 0} | keys)
    config = small_config(Laminar(), steps=steps, checkpoints=Checkpoints(every=1))
    return Evaluations(config.model_copy(update={"evaluations": (section,)}), records, version)


def done(version: int, greedy: float) -> EvaluationRecord:
    return EvaluationRecord("a", version, {"greedy_accuracy": greedy, "num_samples": 0})


def test_what_was_due_before_the_run_was_resumed_is_told_and_what_is_recorded_is_not_due_again() -> None:
    known = evaluations(done(0, 0.5), version=6)
    assert [one.version for one in known.look(6)] == [2, 4]
    assert known.waiting.wanted == {"a": 6}
    assert evaluations(*(done(v, 0.5) for v in (0, 2, 4, 6)), version=6).look(7) == []


def test_the_best_and_those_not_evaluated_yet_keep_their_checkpoints() -> None:
    known = evaluations(done(0, 0.1), done(2, 0.8), done(4, 0.5), version=6, keep_best=True)
    assert known.spared(6) == [2, 6]
    known.look(7)
    assert known.spared(8) == [2, 6, 8]
    assert evaluations(done(2, 0.8), version=6).spared(6) == []


def test_one_in_place_of_another_is_no_best_where_it_may_have_no_checkpoint() -> None:
    for keep_best, best in ((True, 2), (False, 5)):
        known = evaluations(done(2, 0.5), version=6, keep_best=keep_best)
        assert known.ended(done(5, 0.8)) is not keep_best
        assert (
            f"version {best}"
            in evaluations(
                done(2, 0.5), done(5, 0.8), done(6, 0.1), version=6, keep_best=keep_best, patience=1
            ).stop_reason()
        )


def test_a_version_that_is_lost_under_way_begins_again_unless_a_newer_one_waits() -> None:
    prompt = Prompt(0, "row", token_array([1]), "p")
    known = evaluations(version=2)
    known.look(2)
    assert known.begin("a", 2, [prompt], 0.0) is None
    assert known.lose() is None and known.waiting.wanted == {"a": 2}
    skipped = known.begin("a", 3, [prompt], 0.0)
    assert skipped is not None and (skipped.version, "version 3" in skipped.reason) == (2, True)
    known.look(4)
    skipped = known.lose()
    assert skipped is not None and (skipped.version, "version 4" in skipped.reason) == (3, True)
    assert known.waiting.wanted == {"a": 4} and known.underway is None


def test_spared_checkpoints_stay_when_old_ones_are_removed(tmp_path: Path) -> None:
    for version in range(1, 7):
        (tmp_path / f"v{version:08d}").mkdir()
    removed = prune_checkpoints(tmp_path, newest=6, keep=2, spared=[2])
    assert [path.name for path in removed] == ["v00000001", "v00000003", "v00000004"]


def test_it_is_enough_after_so_many_without_a_better_one() -> None:
    records = done(0, 0.1), done(2, 0.8), done(4, 0.5), done(6, 0.8)
    assert "its best is version 2" in evaluations(*records, version=6, patience=2).stop_reason()
    assert evaluations(*records, version=6, patience=3).stop_reason() == ""
    assert evaluations(*records, version=6).stop_reason() == ""


def test_a_late_reward_of_another_version_and_tokens_of_another_lease_change_nothing() -> None:
    known = evaluations(version=2, prompts=1)
    known.look(2)
    known.begin("a", 2, [Prompt(0, "row", token_array([1]), "p")], 0.0)
    under = known.underway
    assert under is not None
    (one,) = under.completions
    one.lease(2, Sampling(max_tokens=4), 0, 0)
    columns = TokenColumns.of([7], [-0.1], 2)
    assert not one.take(Progress(0, 1, 0, columns, Finish.STOP), answered=False)
    assert one.take(Progress(0, 2, 0, columns, Finish.STOP), answered=False)
    request = under.score_request(one)
    under.answer(request.trajectory_id - 1, Scored(1.0))
    assert under.unscored
    under.answer(request.trajectory_id, Scored(1.0))
    assert not under.unscored
    assert under.metrics()["greedy_accuracy"] == 1.0


def attempt(index: int = 0) -> PromptAttempt:
    return PromptAttempt(index, 0, Prompt(5, "row", token_array([1, 2]), "p"), 1)


def turn(one: PromptAttempt, token: int, finish: Finish = Finish.STOP) -> None:
    """The attempt generates one token, which ends a turn."""
    lease = one.lease(one.trajectory.lease + 1, Sampling(max_tokens=4), 0, 0)
    columns = TokenColumns.of([token], [-0.1], 3)
    assert one.take(Progress(0, lease.lease, len(lease.tokens), columns, finish), answered=True)


def test_an_attempt_goes_on_with_what_an_environment_answered_and_is_recorded_with_it() -> None:
    one = attempt()
    turn(one, 7)
    request = one.score_request(40, 32)
    assert (request.trajectory_id, request.group_id, request.finish) == (40, 5, Finish.TURN)
    assert (request.turns, request.room) == ([(0, 1, True)], 29)
    one.answer(Observed(token_array([8, 0])))
    assert one.is_queued and one.score is None
    work = one.lease(9, Sampling(max_tokens=4), 0, 0)
    assert (list(work.tokens), work.turn_start, work.sampling.max_tokens) == ([7, 8, 0], 3, 7)
    one.lose_lease()
    turn(one, 6)
    one.answer(Scored(0.5))
    record = one.record()
    assert (record.reward, record.finish, list(record.tokens)) == (0.5, Finish.STOP, [7, -9, -1, 6])
    columns = unmarked(record.tokens, 3)
    assert columns.turns() == [(0, 1, True), (1, 3, False), (3, 4, True)]
    assert columns.tokens == one.trajectory.columns.tokens
    assert columns.runs == one.trajectory.columns.runs


def test_an_attempt_begins_with_the_bounds_of_its_prompt() -> None:
    prompt = Prompt(5, "row", token_array([1, 2]), "p", TurnBounds(2, ("x",)))
    work = PromptAttempt(0, 0, prompt, 1).lease(1, Sampling(max_tokens=4), 0, 0)
    assert (work.sampling.max_tokens, work.sampling.stop) == (2, ("x",))


def test_an_episode_that_fails_has_no_reward_and_one_that_a_budget_ends_is_truncated() -> None:
    failed, cut = attempt(), attempt()
    for one in (failed, cut):
        turn(one, 7)
    failed.answer(Failed("it raised"))
    cut.answer(Scored(0.0, truncated=True))
    assert (failed.record().reward, failed.record().reason) == (None, "it raised")
    assert cut.record().finish is Finish.LENGTH
    failed.answer(Scored(1.0))  # late
    assert failed.record().reward is None


def test_episodes_that_have_begun_come_first_and_not_too_many_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = [attempt(index) for index in range(6)]
    for one in attempts[3:5]:
        turn(one, 7)
    attempts[4].answer(Observed(token_array([8])))
    assert [one.index for one in next_turns(attempts, 3)] == [4, 0, 1]
    monkeypatch.setattr("millrace.controller.evaluation.prompt_attempt.UNDERWAY_MAX", 3)
    assert [one.index for one in next_turns(attempts, 3)] == [4, 0]
