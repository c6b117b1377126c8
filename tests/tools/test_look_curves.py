"""Curves: what an address chooses, smoothing, ranges, groups of runs, files; and nonsense."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.look_runs import write_run
from tests.unit.observe_events import step

from millrace.config.freeze import record
from millrace.core.errors import DataError
from millrace.observe.sinks.jsonl import MetricsLog
from millrace_ui.curves.cards import curve_file
from millrace_ui.curves.chart import chart
from millrace_ui.curves.choices import SMOOTH_MAX, SPEED, Band, CurveChoices, column, measured
from millrace_ui.curves.comparison_page import RunGroups, configurations
from millrace_ui.curves.curve_lines import (
    FIRST_MAX,
    PLACES_MAX,
    CurveSet,
    Line,
    extremes,
    group_line,
    run_line,
    smoothed,
)
from millrace_ui.drawing.colours import ChartScale, apart, written
from millrace_ui.page import document
from millrace_ui.record.runs import RunRow
from millrace_ui.record.steps import Axis, Steps
from millrace_ui.site import Site

REWARD = "reward/mean"


def steps_of(path: Path, *rewards: float, first: int = 1) -> Steps:
    """A log of steps with these rewards."""
    log = MetricsLog(path)
    for version, reward in enumerate(rewards, first):
        log(step(2.0 * version, version, reward_mean=reward, reward_metrics={"format": 0.5}))
    log.close()
    steps = Steps(path)
    steps.update()
    return steps


def seeded_runs(root: Path) -> Site:
    """Two learning rates with two seeds each."""
    for index, rate in enumerate((1e-6, 1e-6, 1e-5, 1e-5)):
        run = write_run(root / f"run-{index}", steps=4)
        config = run.read_config()
        optimizer = config.optimizer.model_copy(update={"lr": rate})
        record(config.model_copy(update={"seed": index % 2, "optimizer": optimizer}), run.config)
    return Site(root, "/t/")


RUNS = {"run": [f"run-{index}" for index in range(4)]}


# ------------------------------------------------------------ choices


def test_choices_come_back_from_their_address() -> None:
    query = {"metric": [REWARD, "trainer/loss"], "smooth": ["0.9"], "log": ["1"], "by": ["tokens"]}
    choices = CurveChoices.of(query | {"from": ["3"], "to": ["9"], "run": ["a b"], "band": ["deviation"]})
    address = choices.address()
    assert address == (
        "?run=a+b&metric=reward%2Fmean&metric=trainer%2Floss&by=tokens&smooth=0.9&log=1&from=3&to=9&band=deviation"
    )
    assert CurveChoices().address() == "?"


@pytest.mark.parametrize(
    ("query", "choices"),
    [
        ({"smooth": ["nan"], "by": ["moon"], "from": ["-1"], "to": ["x"], "band": ["?"]}, CurveChoices()),
        ({"smooth": ["7"], "from": ["9"], "to": ["3"]}, CurveChoices(smooth=SMOOTH_MAX, first=3, last=9)),
        ({"smooth": ["-1"], "from": ["9" * 30], "log": []}, CurveChoices()),
    ],
)
def test_choices_that_make_no_sense_are_left_out(query: dict[str, list[str]], choices: CurveChoices) -> None:
    assert CurveChoices.of(query) == choices


# ------------------------------------------------------------ lines


def test_an_average_has_no_bias_at_its_start() -> None:
    assert smoothed([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


def test_a_range_of_versions_changes_no_smoothed_value(tmp_path: Path) -> None:
    steps = steps_of(tmp_path / "m", 0.0, 1.0, 0.0, 1.0)
    whole = run_line("a", steps, REWARD, CurveChoices(smooth=0.5))
    part = run_line("a", steps, REWARD, CurveChoices(smooth=0.5, first=2, last=3))
    assert list(part.x) == [2, 3]
    assert list(part.y) == list(whole.y[1:3])
    assert part.rough is not None and list(part.rough) == [1.0, 0.0]


def test_a_range_is_of_versions_on_every_axis(tmp_path: Path) -> None:
    steps = steps_of(tmp_path / "m", 0.1, 0.2, 0.3)
    assert list(run_line("a", steps, REWARD, CurveChoices(by=Axis.TOKENS, first=2)).x) == [200, 300]


def test_a_group_has_its_mean_and_its_band_over_the_runs_that_came_so_far() -> None:
    long, short = (
        Line("", np.array([1.0, 2, 3]), np.array([1.0, 2, 3])),
        Line("", np.array([1.0, 2]), np.array([3.0, 4])),
    )
    line = group_line("g", [long, short], Band.RANGE)
    assert line.low is not None and line.high is not None and line.num is not None
    assert [list(values) for values in (line.y, line.low, line.high)] == [[2, 3, 3], [1, 2, 3], [3, 4, 3]]
    assert list(line.num) == [2, 2, 1]
    spread = group_line("g", [long, short], Band.DEVIATION)
    assert spread.high is not None
    assert list(spread.high - spread.y) == pytest.approx([2**0.5, 2**0.5, 0.0])
    assert len(group_line("g", [], Band.RANGE).x) == 0


def test_a_clock_that_goes_back_moves_no_point_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    for version, second in enumerate((2.0, 12.0, 7.0, 9.0), 1):
        log(step(second, version))
    log.close()
    steps = Steps(tmp_path / "m.jsonl")
    steps.update()
    line = run_line("a", steps, REWARD, CurveChoices(by=Axis.TIME))
    assert (np.diff(line.x) >= 0).all() and len(line.x) == 4
    mean = group_line("g", [line, line], Band.RANGE)
    assert mean.num is not None and (mean.num == 2).all()
    assert chart(REWARD, [mean], (0.0, 1.0), x_label="minutes", log=False)


def test_the_mean_of_a_group_has_a_bounded_number_of_places() -> None:
    members = [Line("", np.arange(5_000.0) + shift, np.ones(5_000)) for shift in (0.0, 0.3)]
    line = group_line("g", members, Band.RANGE)
    assert len(line.x) <= PLACES_MAX and (line.x[0], line.x[-1]) == (0.0, 4_999.3)


def test_a_long_line_keeps_its_extremes_and_its_ends() -> None:
    y = np.zeros(10_000)
    y[[1234, 7777]] = 5.0, -5.0
    places = extremes(y, 500)
    assert len(places) <= 502
    assert {0, 1234, 7777, 9999} <= set(places.tolist())


# ------------------------------------------------------------ charts


def test_rewards_are_offered_first_and_numbers_are_ordered(tmp_path: Path) -> None:
    names = measured([steps_of(tmp_path / "m", 0.1)])
    assert names[:4] == [REWARD, "reward_metrics/format", "trainer/lr", "trainer/loss"]
    assert SPEED in names and "wall_s" not in names
    assert column(steps_of(tmp_path / "n", 0.1), SPEED)[0] == pytest.approx(100 / 1.5)


@pytest.mark.parametrize(
    ("low", "high", "log", "marks"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5.0, 5.0, False, [4.6, 4.8, 5, 5.2, 5.4]),
        (1e-3, 10.0, True, [1e-3, 1e-2, 1e-1, 1, 10]),
        (-1e299, 1e299, False, [-1e299, -5e298, 0, 5e298, 1e299]),
        (5e-324, 5e-324, False, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_an_axis_has_round_marks(low: float, high: float, log: bool, marks: list[float]) -> None:
    assert ChartScale.of(low, high, log=log).marks() == pytest.approx(marks)


def test_numbers_of_an_axis_differ() -> None:
    assert apart([0.99998, 0.99999, 1.0]) == ["0.99998", "0.99999", "1"]
    assert apart([1e4, 2e4]) == ["10k", "20k"]


def test_numbers_of_an_axis_are_short() -> None:
    assert [written(value) for value in (0.25, 12_500.0, 3e6, 1e-7)] == ["0.25", "12.5k", "3M", "1e-07"]


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_is_well_formed_whatever_its_labels_and_values_are(log: bool) -> None:
    x, y = np.array([1.0, 2, 3]), np.array([-1.0, 0.5, 2e17])
    lines = [Line(f"<script>\x1b{i}", x, y, rough=y, low=y - 1, high=y + 1) for i in range(8)]
    text = chart("<b>", lines, (1, 3), x_label="step", log=log, alone=True)
    root = ElementTree.fromstring(text)
    assert "<script>␛0" in "".join(root.itertext())
    assert len(root.findall("{*}polyline")) == 16
    assert not chart("none", [Line("a", x[:0], y[:0])], (1, 3), x_label="step", log=log)


def test_a_chart_without_a_value_above_0_has_no_logarithmic_axis() -> None:
    line = Line("a", np.array([1.0]), np.array([-1.0]))
    assert not chart("a", [line], (1, 1), x_label="step", log=True)
    assert "<circle" in chart("a", [line], (1, 1), x_label="step")


# ------------------------------------------------------------ pages


def test_choices_stay_in_every_link_of_a_page(tmp_path: Path) -> None:
    site = seeded_runs(tmp_path)
    html = site.curves("run-0", {"metric": [REWARD], "smooth": ["0.9"], "from": ["2"]}).html
    kept = "metric=reward%2Fmean&amp;smooth=0.9&amp;from=2"
    assert f'href="/t/curves/run-0?{kept}"' in html
    assert f'href="/t/csv?run=run-0&amp;{kept}"' in html
    assert "Metrics: 1 of" in html and html.count("<svg") == 1
    first = site.curves("run-0", {}).html
    assert first.count("<svg") == FIRST_MAX


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"metric": ["no/such"]}, "Not measured, or more than 48: no/such."),
        ({"from": ["900"]}, "There is no optimizer step in this range."),
        ({"metric": ["accounting/failed"], "log": ["1"]}, "It has no value above 0 in this range."),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, query: dict[str, list[str]], message: str) -> None:
    assert message in seeded_runs(tmp_path).curves("run-0", query).html


def test_a_run_without_a_step_has_a_page_of_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a").metrics.unlink()
    assert "There is no optimizer step" in Site(tmp_path, "/").curves("a", {"to": ["3"]}).html


def test_seeds_form_one_curve_for_each_value_of_a_key(tmp_path: Path) -> None:
    html = seeded_runs(tmp_path).compare(RUNS | {"group": ["optimizer.lr"], "metric": [REWARD]}).html
    assert html.count("<polygon") == html.count("<polyline") == 2
    assert "optimizer.lr = 1e-05</span>" in html.replace(" (2 runs)", "")
    assert "The band goes from the least to the largest run." in html
    assert "<td class=short>seed</td><td class=short>0, 1</td><td class=short>0, 1</td>" in html


def test_a_group_that_does_not_differ_stays_chosen_and_a_run_counts_once(tmp_path: Path) -> None:
    one = {"run": ["run-0", "run-1", "run-1"], "group": ["optimizer.lr"]}
    html = seeded_runs(tmp_path).compare(one).html
    assert '<option value="optimizer.lr" selected>' in html and "optimizer.lr = 1e-06 (2 runs)" in html


def test_an_unknown_key_groups_nothing_and_is_said(tmp_path: Path) -> None:
    html = seeded_runs(tmp_path).compare(RUNS | {"group": ["<b>"], "metric": [REWARD]}).html
    assert "No run has the key &lt;b&gt;." in html and html.count("<polyline") == 4


def test_more_runs_than_a_comparison_has_room_for_are_named() -> None:
    rows = [RunRow(f"r{i}", keys={"seed": i, "k": i % 2}) for i in range(50)]
    alone, grouped = RunGroups.of(rows, ""), RunGroups.of(rows, "k")
    assert (len(alone.members), len(alone.left_out)) == (6, 44)
    assert {label: len(members) for label, members in grouped.members.items()} == {"k = 0": 20, "k = 1": 20}
    assert grouped.left_out == tuple(f"r{i}" for i in range(40, 50))
    assert len(RunGroups.of(rows, "seed").members) == 12


def test_one_table_has_the_keys_that_differ() -> None:
    rows = {
        "a": [RunRow("a", keys={"x": 1, "same": 0})],
        "b": [RunRow("b", keys={"x": "<i>", "same": 0, "y": None})],
    }
    html = configurations(rows)
    assert "<td class=short>x</td><td class=short>1</td><td class=short>&lt;i&gt;</td>" in html
    assert "<td class=short>y</td><td class=short>not there</td><td class=short>none</td>" in html
    assert "same" not in html
    assert "Their configurations are equal." in configurations({"a": rows["a"]})


def test_curves_that_are_not_all_read_are_read_on_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, query = seeded_runs(tmp_path), RUNS | {"group": ["optimizer.lr"]}
    monkeypatch.setattr("millrace_ui.site.CURVES_READ_S", -1.0)
    assert site.compare(query).again
    monkeypatch.setattr("millrace_ui.site.CURVES_READ_S", 60.0)
    assert not site.compare(query).again


# ------------------------------------------------------------ files


def test_a_file_has_all_points_in_the_range(tmp_path: Path) -> None:
    steps = steps_of(tmp_path / "m", *(float(i) for i in range(2000)))
    choices = CurveChoices(metrics=(REWARD,), smooth=0.5, first=3)
    file = curve_file(CurveSet({"a/<b>": [steps]}, choices), "csv")
    rows = list(csv.reader(io.StringIO(file.content.decode())))
    assert rows[0] == ["curve", "step", REWARD, "not smoothed"]
    assert (len(rows), rows[1][0], rows[1][1], rows[1][3]) == (1999, "a/<b>", "3.0", "2.0")
    assert (file.name, file.content_type) == ("a-b-reward-mean.csv", "text/csv; charset=utf-8")
    svg = curve_file(CurveSet({"a": [steps]}, choices), "svg")
    assert "reward/mean" in "".join(ElementTree.fromstring(svg.content.decode()).itertext())


@pytest.mark.parametrize("query", [{}, {"metric": ["no/such"]}, {"metric": [REWARD], "from": ["99"]}])
def test_a_file_without_a_curve_is_an_error_in_words(tmp_path: Path, query: dict[str, list[str]]) -> None:
    with pytest.raises(DataError, match=r"name one metric|no value to draw"):
        seeded_runs(tmp_path).curve_file("svg", RUNS | query)


# ------------------------------------------------------------ contents


def test_a_long_page_has_its_contents_and_a_script_is_left_alone() -> None:
    body = "<h1>a &amp; b</h1>" + "<h2>Same</h2>" * 4 + "<script>'<h2>no</h2>'</script>"
    html = document("t", body)
    assert '<a class="h1" href="#a-b">a &amp; b</a>' in html
    assert '<h2 id="same">' in html and '<h2 id="same-x">' in html
    assert "'<h2>no</h2>'" in html
    assert "<details" not in document("t", "<h2>one</h2>")


def test_no_heading_takes_the_id_of_a_place_that_is_filled_later() -> None:
    html = document("t", '<h2>Troubles</h2><div id="troubles"></div>')
    assert html.count('id="troubles"') == 1 and '<h2 id="troubles-x">' in html
