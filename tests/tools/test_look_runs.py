"""The table of runs: what a row says, which rows a view chooses, and that nothing in a run is obeyed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.look_runs import write_run
from tests.unit.observe_events import step

from millrace.config.freeze import record
from millrace.observe.sinks.jsonl import MetricsLog
from millrace_ui.drawing.fragments import spark
from millrace_ui.drawing.runs_table import runs_page
from millrace_ui.record.runs import SPARK_POINTS, RunRow, RunRows, RunsView, find_runs, run_row, varying
from millrace_ui.site import Site


def row(name: str, *, rewards: tuple[float, ...] = (), **keys: Any) -> RunRow:
    return RunRow(name, state="finished", rewards=rewards, keys={"seed": 0, "optimizer.lr": 1e-6} | keys)


ROWS = (
    row("a", rewards=(0.1, 0.5), seed=1, **{"observe.tags": ["paper"]}),
    row("b", rewards=(0.9,), seed=2, **{"optimizer.lr": 1e-5}),
    row("c", seed=1),
)


def names(rows: list[RunRow]) -> str:
    return "".join(one.name for one in rows)


def test_a_row_has_the_run_at_a_glance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    one = run_row("a", run)
    assert (one.version, one.steps, one.rewards) == (4, 8, (0.1, 0.2, 0.3, 0.4))
    assert (one.started_s, one.took_s) == (1000.0, 8.0)
    assert (one.model, one.task, one.algorithm, one.schedule) == (
        "start",
        "spell_backward",
        "grpo",
        "millrace",
    )


def test_tags_of_a_configuration_come_into_its_row(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    config = run.read_config()
    tagged = config.observe.model_copy(update={"tags": ["paper", "lr sweep"]})
    record(config.model_copy(update={"observe": tagged}), run.config)
    assert run_row("a", run).tags == ["paper", "lr sweep"]
    assert run_row("a", write_run(tmp_path / "b")).tags == []


def test_a_long_log_is_read_at_some_places_and_at_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    log = MetricsLog(run.metrics)
    for version in range(5, 2001):
        log(step(2.0 * version, version, reward_mean=version / 2000))
    log.close()
    rewards = run_row("a", run).rewards
    assert SPARK_POINTS // 2 < len(rewards) <= SPARK_POINTS + 1
    assert rewards[0] == 0.1 and rewards[-1] == 1.0
    assert list(rewards[1:]) == sorted(rewards[1:])


def test_steps_that_were_undone_are_not_in_the_small_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    log = MetricsLog(run.metrics)
    log(step(99.0, 3, reward_mean=0.9))
    log.close()
    assert run_row("a", run).rewards == (0.1, 0.2, 0.9)


def test_a_run_is_read_again_when_it_has_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = write_run(tmp_path / "a"), RunRows()
    assert rows.of({"a": run})[0].version == 4
    monkeypatch.setattr("millrace_ui.record.runs.run_row", lambda *_: row("a", rewards=(0.75,)))
    assert rows.of({"a": run})[0].version == 4
    os.utime(run.metrics, (1.0, 1.0))
    assert rows.of({"a": run})[0].reward == 0.75


@pytest.mark.parametrize("tree", ["{", "[]", "{}", '{"steps": "many"}', '{"steps": 1, "observe": 3}'])
def test_a_damaged_run_is_a_row_that_says_so_or_has_nothing(tmp_path: Path, tree: str) -> None:
    write_run(tmp_path / "a").config.write_text(tree)
    write_run(tmp_path / "b")
    html = Site(tmp_path, "/").runs({}).html
    assert "/run/b" in html
    assert ("unreadable" in html) == (tree != '{"steps": 1, "observe": 3}')


@pytest.mark.parametrize(
    ("find", "chosen"),
    [
        ("", "abc"),
        ("paper", "a"),
        ("tags=paper", "a"),
        ("seed=1", "ac"),
        ("lr=0.00001", "b"),
        ("-paper seed=1", "c"),
        ("-seed=1", "b"),
        ("no-such", ""),
        ("-", ""),
    ],
)
def test_words_and_keys_choose_runs(find: str, chosen: str) -> None:
    assert names(RunsView(find=find).chosen(ROWS)) == chosen


def test_a_column_sorts_and_runs_without_a_value_come_last() -> None:
    assert names(RunsView(sort="reward").chosen(ROWS)) == "bac"
    assert names(RunsView(sort="reward", reverse="1").chosen(ROWS)) == "abc"
    assert names(RunsView(sort="run").chosen(ROWS[::-1])) == "abc"
    assert "sort=reward&reverse=1" in RunsView(sort="reward").sorted_by("reward")


def test_runs_are_grouped_by_a_key_with_the_spread_of_their_rewards() -> None:
    view = RunsView(group="seed")
    assert [(value, names(rows)) for value, rows in view.groups(ROWS)] == [("1", "ac"), ("2", "b")]
    html = runs_page("/", [row("x", rewards=(0.25,)), row("y", rewards=(0.75,))], RunsView(group="seed"))
    assert "2 runs, last reward 0.5 ± 0.354" in html
    assert "/compare?run=x&amp;run=y" in html


def test_keys_that_differ_can_be_grouped_by() -> None:
    assert varying(ROWS) == ["seed", "optimizer.lr", "observe.tags"]
    assert varying([]) == []


def test_choices_of_an_address_that_make_no_sense_are_left_out() -> None:
    assert RunsView.of({"sort": ["no-such"], "find": ["a b"], "x": ["y"]}) == RunsView(find="a b")


def test_rows_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_ui.drawing.runs_table.SHOWN_MAX", 1)
    assert '2 more: <a href="/?num=3">' in runs_page("/", ROWS, RunsView())
    assert "started earlier" not in runs_page("/", ROWS, RunsView(num="3"))


def test_names_values_and_words_are_text() -> None:
    bad = '"><script>alert(1)</script>'
    rows = [row(bad, **{"observe.tags": [bad], "task.name": bad, "seed": bad}), row("b")]
    for view in RunsView(), RunsView(group="seed"), RunsView(group=bad), RunsView(find=bad, sort="run"):
        assert "<script" not in runs_page("/", rows, view)


def test_a_small_curve_rises_where_its_values_rise() -> None:
    assert 'points="0.0,18.0 10.0,2.0"' in spark([0.0, 1.0], 10, 20)
    assert spark([], 10, 20) == ""


def test_a_run_under_two_names_has_two_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "run-3")
    (tmp_path / "latest").symlink_to("run-3")
    assert {row.name for row in RunRows().of(find_runs(tmp_path))} == {"run-3", "latest"}


def test_a_row_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rows = write_run(tmp_path / "a"), RunRows()
    with monkeypatch.context() as patched:
        patched.setattr("millrace_ui.record.runs.run_row", Mock(side_effect=OSError("busy")))
        assert rows.of({"a": run})[0].trouble == "busy"
    assert rows.of({"a": run})[0].trouble == ""


@pytest.mark.parametrize("query", [{"num": ["9" * 5000]}, {"find": ["-" * 5000 + "x"]}])
def test_a_strange_query_has_its_page(tmp_path: Path, query: dict[str, list[str]]) -> None:
    write_run(tmp_path / "a")
    assert "runs" in Site(tmp_path, "/").runs(query).html


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for place, name in enumerate("ab"):
        os.utime(write_run(tmp_path / name).config, (place, place))
    assert names(RunsView().chosen(RunRows().of(find_runs(tmp_path)))) == "ba"
