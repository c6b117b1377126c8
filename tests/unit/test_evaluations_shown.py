"""Evaluations while training, as sinks, pages, `show` and the doctor tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.look_runs import write_run
from tests.unit.ledger_records import ready_group, step_of
from tests.unit.observe_events import run_started, step

from millrace.config.freeze import record
from millrace.config.schema import Config
from millrace.config.tables.evaluations import EvaluationSection
from millrace.core.events import Event
from millrace.core.types import EvaluationRecord, Scored
from millrace.diagnose.evidence import Evidence
from millrace.diagnose.rules import diagnose
from millrace.estimates.evaluation import Attempt, Evaluation, summarize
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.jsonl import scalars_of
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import evaluations_view
from millrace_ui.overview import Overview
from millrace_ui.record.steps import Axis, newest_figures
from millrace_ui.side_by_side import comparison_record
from millrace_ui.site import Site


def result(right: int, of: int = 40) -> Evaluation:
    """So many greedy completions are right, and one of each prompt's two samples."""
    greedy = [Attempt(Scored(float(i < right), answer="x"), False) for i in range(of)]
    two = [[Attempt(Scored(1.0, answer="x"), False), Attempt(Scored(0.0, answer="y"), False)]] * of
    return summarize("", greedy, two, correct_at=1.0)


def metrics(right: int) -> dict[str, Any]:
    tree = result(right).to_json()
    del tree["model"]
    return tree


def evaluated(time_s: float, version: int, right: int) -> Event:
    fields = {"name": "held-out", "version": version, "best": True, "took_s": 1.0, "metrics": metrics(right)}
    return Event("evaluated", time_s, time_s, fields)


def skipped(time_s: float, version: int) -> Event:
    return Event(
        "evaluation_skipped", time_s, time_s, {"name": "held-out", "version": version, "reason": "too busy"}
    )


def test_a_result_survives_json() -> None:
    assert Evaluation.of_json(result(3).to_json()) == result(3)


def test_sinks_get_one_scalar_for_each_figure() -> None:
    scalars = scalars_of("evaluated", evaluated(1.0, 2, right=10).fields)
    assert scalars["evaluation/held-out/greedy"] == 0.25
    assert scalars["evaluation/held-out/pass_at_2"] == 1.0
    assert scalars["evaluation/held-out/majority_at_2"] == 0.5
    assert scalars_of("evaluation_skipped", skipped(1.0, 2).fields) == {}


def test_the_page_has_points_and_a_table(tmp_path: Path) -> None:
    events = [run_started(), step(2.0, 1), evaluated(2.5, 1, right=10), step(4.0, 2), skipped(4.5, 2)]
    one = Overview("a", write_run(tmp_path / "a", log=events))
    while not one.is_whole or not one.story.evaluations:
        one.update()
    greedy = one.curves(Axis.STEP)["reward"]["evaluation held-out: greedy"]
    assert (greedy.x, greedy.y) == ([1], [0.25])
    facts = one.html_by_id()["facts"]
    assert "held-out" in facts and "0.250" in facts and "too busy" in facts


def write_evaluations(path: Path, *rights: int) -> None:
    """Of so many versions. An evaluation of the last one was skipped."""
    ledger = SqliteLedger(path, run={})
    for version, right in enumerate(rights):
        if version:
            group = ready_group(version, version - 1)
            ledger.admit([group])
            ledger.commit_step(step_of(version, group))
        ledger.evaluated(EvaluationRecord("held-out", version, metrics(right)), [])
    ledger.evaluated(EvaluationRecord("other", len(rights) - 1, reason="too busy"), [])
    ledger.close()


def evaluated_run(path: Path, *rights: int) -> RunDirectory:
    run = write_run(path)
    sections = (EvaluationSection(name="held-out", samples=2, by="greedy"), EvaluationSection(name="other"))
    record(run.read_config().model_copy(update={"evaluations": sections}), run.config)
    run.ledger.unlink()
    write_evaluations(run.ledger, *rights)
    return run


def test_a_comparison_has_the_newest_figure_of_each_evaluation(tmp_path: Path) -> None:
    one, other = evaluated_run(tmp_path / "a", 10, 20, 15), write_run(tmp_path / "b")
    label = "evaluation held-out: greedy"
    assert newest_figures(one, one.read_config()) == {label: 0.375}
    assert newest_figures(other, other.read_config()) == {}
    figures = comparison_record([Overview("a", one), Overview("b", other)], 10)["figures"]
    assert figures[label] == [0.375, None]
    assert list(figures).index(label) == list(figures).index("reward, last tenth") + 1


def test_groups_of_runs_have_the_mean_of_their_evaluations(tmp_path: Path) -> None:
    for name, right in ("a", 10), ("b", 20):
        evaluated_run(tmp_path / name, right)
    html = Site(tmp_path, "/").compare({"run": ["a", "b"], "group": ["seed"]}).html
    assert "<th>evaluation held-out: greedy</th>" in html and "0.375 ± 0.177" in html


def test_show_names_the_best_version_and_why_one_was_skipped(tmp_path: Path) -> None:
    write_evaluations(tmp_path / "ledger.sqlite", 10, 20, 15)
    config = Config.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    )
    config = config.model_copy(update={"evaluations": (EvaluationSection(name="held-out", samples=2),)})
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        lines = evaluations_view(reader, config)
    assert [(line["greedy"], line["best"]) for line in lines] == [
        (0.25, ""),
        (0.5, "best"),
        (0.375, ""),
        (None, ""),
    ]
    assert lines[0]["greedy_low"] < 0.25 < lines[0]["greedy_high"]
    assert lines[3]["skipped"] == "too busy"


def evidence(*rights: int, rising: bool = True) -> Evidence:
    """An evaluation after each second of the steps."""
    seen = Evidence()
    for version in range(1, 2 * len(rights) + 1):
        step_event = step(float(version), version)
        step_event.fields["reward_mean"] = 0.1 * version if rising else 0.5
        seen(step_event)
        if version % 2 == 0:
            seen(evaluated(version + 0.5, version, rights[version // 2 - 1]))
    return seen


@pytest.mark.parametrize(
    ("rights", "rising", "found"),
    [
        ((10, 36, 12, 8), True, ["overfitting"]),
        ((10, 36, 12, 8), False, []),  # training got no better either
        ((10, 20, 18, 19), True, []),  # within what chance does
        ((10, 20, 30, 36), True, []),
    ],
)
def test_a_model_that_gets_worse_while_its_reward_rises_is_told(
    rights: tuple[int, ...], rising: bool, found: list[str]
) -> None:
    assert [one.fault for one in diagnose(evidence(*rights, rising=rising))] == found


def test_an_evaluator_that_is_too_slow_is_told() -> None:
    seen = evidence(10)
    for version in range(3, 6):
        seen(skipped(float(version), version))
    (finding,) = diagnose(seen)
    assert finding.fault == "evaluations-skipped"
    assert finding.evidence == ("evaluation held-out skipped 3 of 4 versions that were due",)
