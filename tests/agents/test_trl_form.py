"""A class that is written by the rules of TRL's documentation is played as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.agents.episodes import play_by_hand
from tests.agents.played import EXAMPLES

pytestmark = pytest.mark.usefixtures("warm")

PATH = f"{EXAMPLES / 'trl_guess.py'}:GuessNumber"
ROW = {"prompt": "Guess the number.\n", "secret": 42}


@pytest.fixture
def play(model: Path, tmp_path: Path) -> Any:
    return lambda *actions: play_by_hand(PATH, ROW, *actions, model=model, directory=tmp_path)


def test_its_methods_answer_calls_and_its_attribute_is_the_reward(play: Any) -> None:
    call = '<tool_call>{"name": "guess", "arguments": {"number": 42}}</tool_call>'
    episode = play("guess(50)", call, "It is 42.")
    assert episode["prompt"] == "Guess the number.\nIt is between 1 and 100.\n"
    assert [turn["answer"] for turn in episode["turns"]] == ["Lower.\n", "Right.\n", ""]
    assert (episode["outcome"], episode["value"]) == ("scored", 1.0)
    assert episode["metrics"]["calls_guess"] == 2 and episode["metrics"]["tool_errors"] == 0


def test_what_it_raises_and_wrong_calls_are_answered(play: Any) -> None:
    episode = play("guess(500)", 'guess("x")', "guess(42)", "guess(42)", "It is 41.")
    outside, wrong, right, over, _ = [turn["answer"] for turn in episode["turns"]]
    assert outside == "Error: ValueError: The number is between 1 and 100.\n"
    assert wrong.startswith("Error: guess: argument number: Expected `int`")
    assert (right, over) == ("Right.\n", "Error: ValueError: Game over.\n")
    assert episode["value"] == 1.0
    assert episode["metrics"]["tool_errors"] == 3 and episode["metrics"]["malformed"] == 1


def test_an_episode_without_a_right_guess_earns_nothing(play: Any) -> None:
    assert play("guess(50)", "It is 50.")["value"] == 0.0
