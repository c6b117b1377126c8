"""What `report`, `compare` and `trace` print and write, and a run's card in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.look_runs import write_run

from millrace.api.run import Run
from millrace.cli.app import run
from millrace.observe.sinks.log_files import rotate
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.commands import ui
from millrace_ui.notebook import card


def test_two_runs_are_compared_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name).path) for name in ("a", "b")]
    assert run(["compare", *paths, "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["runs"] == ["a", "b"]
    assert comparison["figures"]["steps"] == [4, 4]
    assert comparison["differences"] == {"b": []}
    assert run(["compare", *paths]) == 0
    assert "Their configurations are equal" in capsys.readouterr().out
    assert run(["compare", paths[0]]) == 2


@pytest.mark.parametrize("num", [2, 5, 30])
def test_a_comparison_fits_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = [write_run(tmp_path / f"a-run-with-a-name-that-is-longer-than-usual-{i}") for i in range(num)]
    for index, one in enumerate(made):
        tree = json.loads(one.config.read_text())
        one.config.write_text(json.dumps(tree | {"seed": 1000 + index}))
    assert run(["compare", *(str(one.path) for one in made)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert f"{1000 + num - 1:,}" in said


def test_python_compares_and_examines_and_reports_as_the_command_line_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    a, b = (Run(write_run(tmp_path / name).path) for name in ("a", "b"))
    compared, diagnosis = a.compare(b.path), a.doctor()
    for command, shown in (
        (["compare", str(a.path), str(b.path)], compared),
        (["doctor", str(a.path)], diagnosis),
    ):
        run(command)
        assert capsys.readouterr().out.rstrip("\n") == str(shown)
        run([*command, "--json"])
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(shown.to_json()))
    assert (compared.runs, compared.figures["steps"], compared.differences) == (["a", "b"], [4, 4], {"b": []})
    assert compared._repr_html_().count("<svg") == 2
    assert diagnosis.healthy and "no fault" in diagnosis._repr_html_()
    assert a.report(tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name / "run").path) for name in ("a", "b")]
    assert run(["compare", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["a/run", "b/run"]


def test_the_doctor_says_what_of_the_algorithm_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_run(tmp_path / "a")
    run(["doctor", str(made.path)])
    assert 'note       `algorithm.clip` ("ppo") changes nothing' in capsys.readouterr().out
    run(["doctor", str(made.path), "--json"])
    assert len(json.loads(capsys.readouterr().out)["inert"]) == 1


def test_a_trace_is_written(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a")
    assert run(["trace", str(made.path), "--out", str(tmp_path / "trace.json")]) == 0
    names = {record["name"] for record in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"step 4", "pull 1"} <= names


def test_a_trace_is_written_while_events_are_rotated(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a")
    rotate(made.events)
    assert run(["trace", str(made.path), "--out", str(tmp_path / "trace.json")]) == 0


def test_a_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_run(tmp_path / "a")
    out = tmp_path / "a.html"
    assert run(["report", str(made.path), "--out", str(out)]) == 0
    assert f"{out.stat().st_size:,} bytes" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_file_that_cannot_be_written_asks_for_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    made = write_run(tmp_path / "a")
    assert run([command, str(made.path), "--out", str(tmp_path / "none" / "out")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--out" in said
    assert "--resume" not in said


def test_a_run_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a<b>")
    html = Run(made.path)._repr_html_()
    assert "stopped, 4 of 8 steps" in html
    assert "<svg" in html
    assert "a<b>" not in html


def test_a_card_says_what_is_wrong(tmp_path: Path) -> None:
    made = write_run(tmp_path / "a")
    made.metrics.write_bytes(b"{\n")
    assert "not a whole step" in card(RunDirectory(made.path))


def test_pages_are_served_before_the_first_run_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Path] = []

    async def serve(runs: Path, port: int) -> None:
        served.append(runs)

    monkeypatch.setattr(ui, "_serve", serve)
    monkeypatch.setattr(ui.os, "nice", lambda _: None)
    assert run(["ui", str(tmp_path / "runs")]) == 0
    assert f"There is no run in {tmp_path / 'runs'} yet: the page shows the first one" in (
        capsys.readouterr().out
    )
    write_run(tmp_path / "runs" / "a")
    assert run(["ui", str(tmp_path / "runs")]) == 0
    assert "no run" not in capsys.readouterr().out and len(served) == 2
    assert run(["ui", __file__]) == 1
    assert "is a file" in capsys.readouterr().err and len(served) == 2
