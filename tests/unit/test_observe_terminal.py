"""What others say is shown on a terminal, and never obeyed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from millrace.cli import app
from millrace.core.errors import RewardError
from millrace.observe.live.live_view import render
from millrace.observe.live.status import Status
from millrace.observe.terminal import Terminal, harmless

OBEYED = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\r\u202e"


def printed(*renderables: object) -> str:
    output = io.StringIO()
    Terminal(file=output, width=200).print(*renderables)
    return output.getvalue()


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    kept = harmless(text)
    assert len(kept) == len(text)
    assert all(character in "\n\t" or character.isprintable() or ord(character) > 0x9F for character in kept)


@pytest.mark.parametrize("wrap", [str, Text, lambda text: _table(text)])
def test_no_renderable_lets_an_escape_sequence_through(wrap) -> None:
    said = printed(wrap(f"before{OBEYED}after"))
    assert "before\u241b[2J" in said and not set(OBEYED) & {*"\x1b\x07\x9b\x08\r\u202e"} & set(said)


def test_brackets_in_what_others_say_are_no_markup() -> None:
    assert "[red]x[/b]" in printed("[red]x[/b]")


def test_the_console_s_own_styles_stay() -> None:
    output = io.StringIO()
    Terminal(file=output, force_terminal=True, color_system="standard").print("plain", style="red")
    assert "\x1b[31mplain" in output.getvalue()


def test_the_live_view_s_trouble_is_harmless() -> None:
    status = Status()
    status.last_trouble = f"died{OBEYED}[/x]"
    assert "died\u241b[2J" in printed(render(status))


def test_an_error_s_words_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    app.print_error(RewardError(f"raised{OBEYED}"))
    assert "raised\u241b[2J" in capsys.readouterr().err


def _table(text: str) -> Table:
    table = Table()
    table.add_column("what")
    table.add_row(text)
    return table


def test_a_terminal_without_utf_8_gets_a_question_mark_for_what_it_lacks() -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    Terminal(file=output, width=60).print(Text("caf\u00e9 \u2581 \x1b[2J"), _table("\u2190"))
    output.seek(0)
    assert "caf? ? ?[2J" in output.read()
