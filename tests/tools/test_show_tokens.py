"""`millrace show` chooses trajectories and colours tokens as the pages do."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence

import pytest
from tests.group_runs import write_group_run

from millrace.cli.app import run as millrace
from millrace.ledger.samples import Choice, SampleFilter
from millrace.observe.terminal import Terminal
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.drawing.colours import TokenColor
from millrace_ui.record.tokens import TokenText, choose
from millrace_ui.shown_trajectories import ColoredTokens, ColorLegend
from millrace_ui.site import Site

TOKENS = (
    TokenText("sure", -0.1, 3, (1,), -0.5),
    TokenText("un", -1.2, 3, (2,), -0.5),
    TokenText("likely", -1.4, 4, (3,), 1.0),
    TokenText("\x1b[2J", None, None, (4,)),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_group_run(tmp_path_factory.mktemp("shown") / "g")


def drawn(color: TokenColor, **console: object) -> str:
    stream = io.StringIO()
    how: dict[str, object] = {"file": stream, "width": 120, "color_system": "truecolor"}
    Terminal(**(how | console)).print(ColorLegend(color), ColoredTokens(TOKENS, color, 1.0, left_out=7))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("options", "only"),
    [
        (["--state", "failed"], SampleFilter(state="failed")),
        (["--reason", "RAISED"], SampleFilter(reason="RAISED")),
        (["--reward-min", "0.5"], SampleFilter(reward_min=0.5)),
        (["--reward-max", "0.25", "--tokens-min", "3"], SampleFilter(reward_max=0.25, tokens_min=3)),
        (["--tokens-max", "2", "--worst"], SampleFilter(tokens_max=2)),
    ],
)
def test_a_filter_lets_the_same_trajectories_through_as_on_the_page(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], options: Sequence[str], only: SampleFilter
) -> None:
    choice = Choice.WORST if "--worst" in options else Choice.NEWEST
    expected = [one.trajectory_id for one in choose(run, None, choice, 100, only=only)]
    assert 0 < len(expected) < 36
    assert millrace(["show", str(run.path), "--samples", "100", *options, "--json"]) == 0
    assert [one["trajectory_id"] for one in json.loads(capsys.readouterr().out)] == expected
    assert millrace(["show", str(run.path), "--samples", "1", *options]) == 0
    said = capsys.readouterr().out
    assert (
        f"{len(expected)} trajectories. The first 1 are shown." in said or "\n1 trajectory.\n" in f"\n{said}"
    )


def test_a_filter_alone_asks_for_samples(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert millrace(["show", str(run.path), "--state", "failed", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["failed"]
    assert millrace(["show", str(run.path), "--state", "stale"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "none"


def test_a_search_goes_on_where_it_ended(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["show", str(run.path), "--text", "DCBA", "--reward-max", "0.25"]
    assert millrace([*search, "--samples", "4"]) == 0
    said = capsys.readouterr().out
    text = " ".join(said.split())
    before = re.search(r"filter lets through, the newest first. --before (\d+) looks further back", text)
    assert before is not None
    ids = list(map(int, re.findall(r"^trajectory (\d+)", said, re.MULTILINE)))
    assert millrace([*search, "--samples", "40", "--before", before[1]]) == 0
    said = capsys.readouterr().out
    ids += map(int, re.findall(r"^trajectory (\d+)", said, re.MULTILINE))
    assert len(ids) == 9 and ids == sorted(ids, reverse=True)
    assert "These were all." in " ".join(said.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--color", "red", "--samples", "1"], "'red' is not one of"),
        (["--color", "version"], "add --group or --samples"),
        (["--color", "version", "--step", "1"], "add --group or --samples"),
        (["--color", "advantage", "--samples", "1"], "name one with --group"),
        (["--color", "version", "--group", "1", "--json"], "--json has no colours"),
        (["--state", "dead"], "'dead' is not one of"),
        (["--reward-min", "x"], "unable to parse string as a number"),
        (["--reward-min", "nan"], "--reward-min is no number"),
        (["--reward-min", "1", "--reward-max", "0"], "--reward-min 1.0 is above --reward-max 0.0"),
        (["--tokens-min", "9", "--tokens-max", "3"], "--tokens-min 9 is above --tokens-max 3"),
        (["--tokens-max", "-1"], "greater than or equal to 0"),
        (["--text", "a", "--worst"], "leave --worst out"),
        (["--before", "4"], "name its --text"),
        (["--group", "1", "--state", "failed"], "exclude each other"),
    ],
)
def test_a_wrong_value_is_one_error(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], options: Sequence[str], said: str
) -> None:
    assert millrace(["show", str(run.path), *options]) == 2
    captured = capsys.readouterr()
    assert said in " ".join(captured.err.replace("│", " ").split()) and not captured.out


def test_a_terminal_has_colours_and_no_marks() -> None:
    texts = {color: drawn(color, force_terminal=True) for color in TokenColor if color is not TokenColor.NONE}
    assert all("\x1b[" in text and "«" not in text for text in texts.values())
    assert all("\u241b[2J" in text and "[... 7 more tokens ...]" in text for text in texts.values())
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize(
    "console",
    [{"color_system": None}, {"color_system": "standard"}, {"no_color": True, "force_terminal": True}],
    ids=["no terminal", "16 colours", "NO_COLOR"],
)
def test_without_colours_marks_have_the_values(console: dict[str, object]) -> None:
    texts = {color: drawn(color, **console) for color in TokenColor if color is not TokenColor.NONE}
    assert "\nsure«-1.4:unlikely»\u241b[2J\n" in texts[TokenColor.LOGPROB]
    assert "\n«v3:sureun»«v4:likely»\u241b[2J\n" in texts[TokenColor.VERSION]
    assert "\n«-0.5:sureun»«+1:likely»\u241b[2J\n" in texts[TokenColor.ADVANTAGE]
    assert not any("\x1b" in text for text in texts.values())


@pytest.mark.parametrize("color", [one.value for one in TokenColor])
def test_every_colour_of_the_page_is_one_of_the_command(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], color: str
) -> None:
    html = Site(run.path.parent, "/").group("g", {"id": ["1"], "color": [color]}).html
    assert f'value="{color}" checked' in html
    assert millrace(["show", str(run.path), "--group", "1", "--color", color]) == 0
    said = capsys.readouterr().out
    assert ("tokens marked by" in said) == (color != "none")
    marks = {
        "advantage": "«+1.52:abcd»",
        "version": "«v0:a»«v1:bcd»",
        "logprob": "ab«-0.8:c»«-1.2:d»",
        "none": "abcd",
    }
    assert marks[color] in said


def test_advantages_that_are_not_known_are_said(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_group_run(tmp_path_factory.mktemp("critic") / "g", steps=1, algorithm="ppo")
    assert millrace(["show", str(other.path), "--group", "0", "--color", "advantage"]) == 0
    said = capsys.readouterr().out
    assert "The advantages are not recorded" in said and "tokens marked" not in said
