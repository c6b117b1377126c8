"""A run as a page: what is read of it, what is drawn, and that nothing in it is obeyed."""

from __future__ import annotations

import json
import re
from collections import Counter
from math import inf, nan
from pathlib import Path
from typing import Any, cast

import pytest
from tests.look_runs import PROMPT, config, events, write_run
from tests.unit.observe_events import event, step

from millrace.config.freeze import record
from millrace.config.tables.generation import SamplingConfig
from millrace.core.errors import DataError, LedgerError
from millrace.core.types import Scored
from millrace.diagnose.examine import count_rewards, evidence_of, examine
from millrace.diagnose.finding import Finding
from millrace.estimates.evaluation import Attempt, summarize
from millrace.evaluation.evaluated_runs import keep
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Choice
from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace_ui.curves.chart import run_charts
from millrace_ui.drawing import bars, fragments
from millrace_ui.drawing.charts import CHARTS
from millrace_ui.drawing.colours import COLORS
from millrace_ui.drawing.fragments import sample
from millrace_ui.overview import Overview, who_waits
from millrace_ui.record.runs import find_runs, run_line
from millrace_ui.record.steps import Axis, Curve, Steps, curve, table_of
from millrace_ui.record.story import Story, TimelineBar
from millrace_ui.record.tokens import Shown, TokenText, choose, search
from millrace_ui.run_report import BYTES_MAX, write_report


def overview(path: Path) -> Overview:
    made = Overview("one", write_run(path))
    made.update()
    return made


def tell(path: Path, *records: object) -> None:
    log = MetricsLog(path)
    for one in records:
        log(one)
    log.close()


def test_steps_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = Steps(path)
    steps.update()
    assert len(steps) == 0
    tell(path, step(2.0, 1), step(4.0, 2))
    steps.update()
    tell(path, step(6.0, 3))
    with path.open("ab") as file:
        file.write(b'{"version":4,')
    steps.update()
    assert list(steps.versions) == [1, 2, 3]
    assert steps.curve("reward/mean").y == pytest.approx([0.1, 0.2, 0.3])
    assert steps.curve("reward/mean", Axis.TOKENS).x == [100, 200, 300]
    assert steps.curve("reward/mean", Axis.TIME).x == pytest.approx([0, 2 / 60, 4 / 60])


def test_a_step_done_again_counts_once_and_undone_steps_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tell(path, step(1.0, 1), step(2.0, 2), step(3.0, 3))
    tell(path, step(4.0, 2, reward_mean=0.9, replayed=True))
    steps = Steps(path)
    steps.update()
    assert steps.curve("reward/mean").y == pytest.approx([0.1, 0.9, 0.3])
    tell(path, step(5.0, 2, reward_mean=0.5))
    steps.update()
    assert steps.curve("reward/mean").y == pytest.approx([0.1, 0.5])


def test_a_damaged_step_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"not json\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: not a whole step"):
        Steps(path).update()


def test_a_long_curve_becomes_means_of_neighbours_and_nan_is_left_out() -> None:
    thin = curve(range(10_000), [float(i) for i in range(10_000)], 1000)
    assert len(thin.x) == 1000
    assert thin.x[:2] == thin.y[:2] == [4.5, 14.5]
    assert curve([1, 2], [float("nan"), 3.0]).x == [2]


def test_a_story_reads_on_where_it_stopped(tmp_path: Path) -> None:
    run_events = events(steps=4)
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for one in run_events[:5]:
        log(one)
    story = Story(path, config(tmp_path))
    story.update(1)
    assert story.share_read < 1
    while story.update(1):
        pass
    for one in [
        *run_events[5:],
        event("scored", 9.0, trajectory_id=1, value=1.0, outcome="scored", reason=""),
    ]:
        log(one)
    log.close()
    story.update()
    assert story.summary()["steps"] == 4
    assert story.share_read == 1
    assert [trouble.who for trouble in story.troubles] == ["replica-0"]
    assert {span.row for span in story.spans} == {"trainer", "replica-0"}
    assert [span.share for span in story.activity.spans] == [0.75]  # two seconds of three, in quarters


def test_who_waits_is_said_in_a_sentence() -> None:
    trainer = {"optimizer steps": 5.0, "waiting for a batch": 5.0}
    assert "Generation is the slower side" in who_waits({"trainer": trainer, "replica-0": {"idle": 0.0}})
    busy = {"optimizer steps": 1.0, "waiting for a batch": 0.0}
    replica = {"decoding": 1.0, "idle": 1.0}
    assert "Training is the slower side" in who_waits({"trainer": busy, "replica-0": replica})


def test_runs_are_found_at_two_depths_and_a_broken_one_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "quickstart" / "run")
    (tmp_path / "a" / "config.json").write_text("{")
    runs = find_runs(tmp_path)
    assert set(runs) == {"a", "quickstart/run"}
    whole, broken = (run_line(name, runs[name]) for name in ("quickstart/run", "a"))
    assert (whole.state, whole.version, whole.steps, broken.state) == ("stopped", 4, 8, "unreadable")
    assert "not valid JSON" in broken.trouble


def test_runs_that_are_left_out_of_a_list_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.cli.app import run as millrace

    for name in "abc":
        write_run(tmp_path / name, steps=1)
    monkeypatch.setattr("millrace_ui.commands.show.RUNS_MAX", 1)
    assert millrace(["show", str(tmp_path)]) == 0
    assert "... and 2 more, started earlier: --json shows all" in capsys.readouterr().out
    assert millrace(["show", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_a_run_that_ended_while_its_log_was_rotated_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / "events.jsonl").rename(tmp_path / "a" / "events.000001.jsonl")
    assert set(find_runs(tmp_path)) == {"a"}


def test_no_run_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds none"):
        find_runs(tmp_path)


def test_samples_come_token_by_token(tmp_path: Path) -> None:
    one = overview(tmp_path / "a")
    best = choose(one.run, one.tokenizer, Choice.BEST, 2)
    assert [shown.reward for shown in best] == sorted((shown.reward for shown in best), reverse=True)
    piece = best[0].token_texts[0]
    assert (piece.logprob, piece.version) == (-0.5, 3)
    assert "".join(piece.text for piece in best[0].token_texts) == "aaaa"[:4].replace("a", piece.text)


def test_a_search_looks_from_the_newest_on_and_can_go_on(tmp_path: Path) -> None:
    one = overview(tmp_path / "a")
    first = search(one.run, one.tokenizer, "SCRIPT", 3)
    rest = search(one.run, one.tokenizer, "script", 100, first.before)
    ids = [one.trajectory.trajectory_id for one in first.samples + rest.samples]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 16
    assert rest.before is None
    assert not search(one.run, one.tokenizer, "no such text", 3).samples


@pytest.mark.parametrize(("by", "x"), [(Axis.STEP, [0, 2, 4]), (Axis.TOKENS, [0, 200, 400])])
def test_evaluations_are_points_beside_the_rewards(tmp_path: Path, by: Axis, x: list[float]) -> None:
    one = overview(tmp_path / "a")
    for version in 4, 0, 2:
        keep(one.run, version, summarize("m", [], [[Attempt(Scored(version / 8), False)]], correct_at=1.0))
    reward = one.curves(by)["reward"]
    assert list(reward) == ["training", "evaluations"]
    assert (reward["evaluations"].x, reward["evaluations"].y) == (x, [0.0, 0.25, 0.5])
    html = one.charts(by)["reward"]
    assert html.count("h0") == 4 + 3, "each point of so few is marked"
    assert html.count('stroke-opacity="0"') == 1, "no line joins the evaluations"
    one.run.evaluations.write_text("{")
    with pytest.raises(DataError, match=r"evaluations\.jsonl: a line is damaged"):
        one.curves(by)


def test_a_chart_has_all_its_curves(tmp_path: Path) -> None:
    one = overview(tmp_path / "a")
    assert set(CHARTS[1].curves(one.steps, one.steps.axis(Axis.STEP))) == {"mean", "largest"}


def test_a_run_without_a_curve_takes_no_colour_from_another(tmp_path: Path) -> None:
    one = overview(tmp_path / "a")
    lines = {"empty": Curve([], []), "a": one.steps.curve("reward/mean")}
    drawn = run_charts({chart.name: lines for chart in CHARTS[:1]} | {c.name: {} for c in CHARTS[1:]}, "step")
    assert f'stroke="{COLORS[1]}"' in (html := drawn["reward"]) and COLORS[0] not in html


def test_a_timeline_has_a_row_for_each_role_with_its_bars(tmp_path: Path) -> None:
    html = overview(tmp_path / "a").html_by_id()["lanes"]
    assert re.findall(r"<b>(.*?)</b>", html) == ["trainer", "replica-0"]
    trainer, replica = html.split('<div class="lane">')[1:]
    assert 'background:#3d9970" title="step 1, from 0.017 to 0.033 min"' in trainer
    assert "class=thin" in replica and 'title="pull 1, ' in replica


def span(row: str, start: float, end: float, **named: Any) -> TimelineBar:
    return TimelineBar(row, "report", start, end, "decodes <b>", **named)


def test_bars_of_a_timeline_stand_at_their_shares_of_its_time() -> None:
    html = bars.timeline([span("a", 2.0, 3.0), span("b", 0.0, 4.0, share=0.25)], ["a", "b"])
    assert '<i style="left:50%;width:25%;background:#3d9970" title="decodes &lt;b&gt;, from 2.000' in html
    assert "left:0%;width:100%;background:#3d9970;opacity:0.25" in html
    assert "left:20%;width:10%" in bars.timeline([span("a", 2.0, 3.0)], ["a"], end=10.0)
    assert "Nothing is done yet" in bars.timeline([], [])


def test_a_timeline_has_more_numbers_the_more_it_is_zoomed() -> None:
    html = bars.timeline([span("a", 0.0, 10.0)], ["a"])
    found = {
        zoom: re.findall(r"%\">([^<]+)<", html.split(f"marks z{zoom}")[1].split("</div>")[0])
        for zoom in bars.ZOOMS
    }
    assert found[1] == ["0", "2", "4", "6", "8", "10"]
    assert [len(marks) for marks in found.values()] == [6, 21, 201]
    style = (Path(fragments.__file__).parents[1] / "page.css").read_text()
    assert all(f"--zoom: {zoom};" in style for zoom in bars.ZOOMS[1:])
    assert all(f'[value="{zoom}"]:checked) .z{zoom}' in style for zoom in bars.ZOOMS)


def test_a_bar_has_its_number_and_the_line_of_its_interval() -> None:
    html = bars.bars({"<a>": 50.0, "b": 80.0}, "tokens/s", {"<a>": 60.0, "b": 20.0})
    assert "<b>&lt;a&gt;</b>" in html and ">50<" in html and "tokens/s" in html
    assert re.findall(r'"interval" style="left:([\d.]+)%', html)[0] == "0.00", (
        "no line begins left of its bar"
    )
    assert html.count(COLORS[0]) == html.count(COLORS[1]) == 1
    assert bars.bars({"kept": 12_345}, "rows").count("12,345") == 1


def test_shares_of_time_are_written_without_seconds() -> None:
    times = {"trainer": {"optimizer steps": 0.75, "idle": 0.25}}
    assert 'title="optimizer steps: 75.0%"' in bars.time_bars(times, bars.SHARE_COLORS, unit="")
    assert 'title="optimizer steps: 75.0%, 0.8 s"' in bars.time_bars(times, bars.SHARE_COLORS)


def test_a_report_is_one_small_file_that_obeys_nothing_of_a_run(tmp_path: Path) -> None:
    runs = [overview(tmp_path / name) for name in ("a", "b")]
    size = write_report(runs, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert size < BYTES_MAX
    assert PROMPT not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<script src=" not in text
    assert "2 runs compared" in text


def test_a_long_curve_has_the_means_of_neighbours() -> None:
    drawn = curve([0, 1, 2, nan, 4], [1.0, 3.0, 5.0, 7.0, 9.0], points=2)
    assert (drawn.x, drawn.y) == ([0.5, 3.0], [2.0, 7.0])


def test_a_chart_of_a_long_run_keeps_its_spikes() -> None:
    y = [1.0] * 9_990
    y[5_000] = 1_000.0
    line = {"gradient": {"gradient norm": curve(range(1, len(y) + 1), y, None)}}
    html = run_charts(line | {one.name: {} for one in CHARTS if one.name != "gradient"}, "step")["gradient"]
    _, highest = (float(value) for value in re.search(r'data-y="([^"]+)"', html)[1].split())
    assert 'data-x="1.0 9990.0"' in html and highest >= 1_000


def test_a_step_without_a_time_is_left_out(tmp_path: Path) -> None:
    one = overview(tmp_path / "a")
    first, *others = one.run.metrics.read_text().splitlines()
    line = json.loads(first)
    del line["wall_s"]
    one.run.metrics.write_text("\n".join([json.dumps(line), *others, ""]))
    charts = Overview("a", one.run)
    charts.update()
    assert "nan" not in "".join(charts.charts(Axis.TIME).values())


def test_a_ledger_that_could_not_be_counted_is_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def count(*_: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise LedgerError("interrupted")

    monkeypatch.setattr("millrace_ui.overview.count_rewards", count)
    one = overview(tmp_path / "a")
    one.html_by_id()
    one.html_by_id()
    assert len(tries) == 1
    monkeypatch.setattr("millrace_ui.overview.time.monotonic", lambda: 1e12)
    one.html_by_id()
    assert len(tries) == 2


def test_the_doctor_judges_again_only_when_there_is_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr("millrace_ui.overview.count_rewards", lambda *_: looks.append(1))
    one = overview(tmp_path / "a")
    first = [one.html_by_id()["findings"] for _ in range(3)]
    log = EventLog(one.run.events)
    log(step(99.0, 5))
    log.close()
    one.update()
    assert [*first, one.html_by_id()["findings"]] == 4 * first[:1]
    assert len(looks) == 2


def test_a_ledger_that_takes_too_long_still_tells_how_many_failed(tmp_path: Path) -> None:
    class Slow:
        def states(self) -> Counter[str]:
            return Counter({"trained": 90, "failed": 10})

        def reasons(self) -> None:
            raise LedgerError("stopped")

    evidence = evidence_of(config(tmp_path))
    evidence.outcomes, evidence.failures = Counter({"failed": 10, "scored": 1}), Counter({"late": 10})
    with pytest.raises(LedgerError):
        count_rewards(evidence, cast(LedgerReader, Slow()))
    assert (evidence.outcomes, evidence.failures) == ({"scored": 90, "failed": 10}, {"late": 10})


def test_show_lists_the_runs_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from millrace.cli.app import run as millrace

    for name in ("first", "second"):
        write_run(tmp_path / name)
    assert millrace(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "first" in said and "second" in said and "stopped" in said
    assert millrace(["show", str(tmp_path), "--json"]) == 0
    assert {line["name"] for line in json.loads(capsys.readouterr().out)} == {"first", "second"}


@pytest.mark.parametrize("line", [b'{"version":"\xff"}\n', b'{"version":"seven"}\n', b"[]\n"])
def test_a_last_step_that_makes_no_sense_is_told_in_the_line_of_its_run(tmp_path: Path, line: bytes) -> None:
    run = write_run(tmp_path / "a")
    run.metrics.write_bytes(line)
    run_row = run_line("a", run)
    assert run_row.state == "unreadable"
    assert "the last line is damaged" in run_row.trouble


def test_what_a_page_would_obey_or_hide_is_visible() -> None:
    pieces = tuple(TokenText(text, -0.1, 0) for text in ("\x1b[2J", "\u202e", "<b>", "\u200b"))
    html = sample(Shown(1, 1, "r", "ready", "\u2066", "", None, {}, 1, None, "", "\U000e0041\r", pieces, 0))
    assert "\u241b[2J" in html and "&lt;b&gt;" in html and "\u240d" in html
    assert html.count("\ufffd") == 4
    assert not set("\x1b\u202e\u2066\u200b\U000e0041\r") & set(html)


@pytest.mark.parametrize(("logprob", "shade"), [(0.0, "p0"), (-1.2, "p2"), (-inf, "p8"), (nan, "p8")])
def test_a_token_of_any_logprob_has_a_shade(logprob: float, shade: str) -> None:
    shown = Shown(1, 1, "r", "ready", "", "", None, {}, 1, None, "", "", (TokenText("a", logprob, 0),), 0)
    assert f'class="{shade} v0"' in sample(shown)


def test_page_and_command_say_the_same_of_a_run_and_of_what_it_told(tmp_path: Path) -> None:
    gap = {0: [1e-6, 1e-5, 50], 1: [0.5, 1.0, 50]}
    late = [step(2.0 * v, v, logprob_gap=gap if v <= 4 else {0: [1e-6, 1e-5, 50]}) for v in range(1, 9)]
    finding = event("finding", 9.0, fault="true-staleness", evidence=["the gap"], advice=["lower it"])
    run = write_run(tmp_path / "run", log=[*events(0)[:1], *late[:4], finding, *late[4:]])
    diagnosis = examine(run)
    assert diagnosis["healthy"] and diagnosis["withdrawn"] == ["true-staleness held at version 4; gone since"]
    page = Overview("one", run)
    page.update()
    assert (
        "knows of no fault" in (said := page.html_by_id()["findings"]) and diagnosis["withdrawn"][0] in said
    )


def test_the_page_judges_by_the_configuration_as_the_command_does(tmp_path: Path) -> None:
    gap = {"logprob_gap": {0: [0.05, 0.1, 50]}}
    run = write_run(tmp_path / "run", log=[*events(0)[:1], *(step(2.0 * v, v, **gap) for v in range(1, 9))])
    assert [one["fault"] for one in examine(run)["findings"]] == ["numeric-gap"]
    record(
        run.read_config().model_copy(update={"sampling": SamplingConfig(repetition_penalty=1.5)}), run.config
    )
    assert examine(run)["healthy"]
    page = Overview("one", run)
    page.update()
    assert "knows of no fault" in page.html_by_id()["findings"]


def test_a_table_of_evaluations_has_no_column_without_a_value() -> None:
    metrics = {"num_samples": 0, "greedy_accuracy": 0.72, "pass_at_k": {}, "majority_at_k": {}}
    metrics["intervals"] = {"greedy_accuracy": (0.62, 0.8)}
    done = {("held-out", 20): {"metrics": metrics}}
    head, rows = table_of(done)
    assert head == ["evaluation", "version", "greedy", "interval of 95 %"]
    assert rows == [("held-out", "20", "0.720", "0.620 to 0.800")]
    head, rows = table_of(done | {("held-out", 40): {"reason": "it was late"}})
    assert head[-1] == "skipped" and rows[0] == ("held-out", "40", "", "", "it was late")


def test_keys_in_a_finding_are_code() -> None:
    fault = Finding("f", ("it is `a<b`",), ("set `x.y` to 1",))
    html = fragments.findings([fault], ["`f` holds no more"])
    assert "it is <code>a&lt;b</code>" in html and "set <code>x.y</code> to 1" in html
    assert "<code>f</code> holds no more." in html
