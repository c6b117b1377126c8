"""What is due, what is kept, and when it is enough: from the ledger's position on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import Laminar
from millrace.controller.evaluation.evaluation_state import Evaluations
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import EvaluationRecord, Finish, Progress, Prompt, Scored
from millrace.sim.explore.worlds import small_config
from millrace.trainer.files.directories import prune_checkpoints


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
    one.lease = 2
    columns = TokenColumns()
    columns.append(7, -0.1, 2)
    assert not one.take(Progress(0, 1, 0, columns, Finish.STOP))
    assert one.take(Progress(0, 2, 0, columns, Finish.STOP))
    request = under.score_request(one)
    under.scored(request.trajectory_id - 1, Scored(1.0))
    assert under.unscored
    under.scored(request.trajectory_id, Scored(1.0))
    assert not under.unscored
    assert under.metrics()["greedy_accuracy"] == 1.0
