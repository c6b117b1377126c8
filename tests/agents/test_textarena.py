"""Games of the package `textarena` are played by its own code, in the reward worker of a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.agents.episodes import play_by_hand
from tests.agents.played import EXAMPLES

from millrace import Done
from millrace.episodes.forms import load_environment

pytestmark = pytest.mark.usefixtures("warm")

PATH = f"{EXAMPLES / 'textarena_games.py'}:Game"
GUESSING = {"prompt": "Play.\n", "game": "GuessTheNumber-v0-raw", "seed": 1}


@pytest.fixture
def play(model: Path, tmp_path: Path) -> Any:
    return lambda row, *moves, path=PATH: play_by_hand(path, row, *moves, model=model, directory=tmp_path)


def test_a_game_is_played_to_its_end_and_a_wrong_move_is_answered(play: Any) -> None:
    episode = play(GUESSING, "[10]", "seven", "[4]", "[5]")
    assert "between 1 and 20 within 10 turns" in episode["prompt"]
    lower, wrong, higher, end = [turn["answer"] for turn in episode["turns"]]
    assert (lower, higher, end) == ("The target number is lower.", "The target number is higher.", "")
    assert "did not respond with valid '[number]'" in wrong
    assert (episode["outcome"], episode["value"]) == ("scored", 1.0)
    assert episode["metrics"]["malformed"] == 1 and episode["metrics"]["moves"] == 3


def test_the_second_wrong_move_in_a_row_breaks_the_game_however_near_the_guess_was(play: Any) -> None:
    episode = play(GUESSING, "[6]", "seven", "[70]", "[5]")
    assert len(episode["turns"]) == 3 and episode["outcome"] == "scored"
    assert episode["value"] == 0.0
    assert episode["metrics"]["malformed"] == 2 and episode["metrics"]["broken"] == 1


BREAKABLE = {
    "a sentence": ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte"),
    "partial credit": ("2048", "PegJump", "TowerOfHanoi"),
    "a penalty": ("Bandit", "Secretary"),
}


@pytest.mark.parametrize("game", [game for games in BREAKABLE.values() for game in games])
def test_a_broken_game_is_worth_nothing_whatever_textarena_says(game: str) -> None:
    kind, _ = load_environment(PATH)
    played: Any = kind()
    played.reset({"game": f"{game}-v0-raw", "seed": 1})
    answers = [played.step("hello") for _ in range(2)]
    assert not isinstance(answers[0], Done)
    assert answers[1].reward == 0.0 and answers[1].metrics["broken"] == 1


SAYS = """
import sys
sys.path.insert(0, {examples!r})
import textarena_games

class Game(textarena_games.Game):
    def reset(self, row):
        said = super().reset(row)
        self.game.close = lambda: ({{0: "well played"}}, {{0: {{"invalid_move": False, "turn_count": 1}}}})
        return said
"""


def test_a_reward_that_is_no_number_fails_the_episode(play: Any, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS.format(examples=str(EXAMPLES)))
    episode = play(GUESSING, "[5]", path=f"{tmp_path / 'says.py'}:Game")
    assert episode["outcome"] == "failed" and "of type str: a finite number" in episode["reason"]


def test_another_game_needs_another_id_alone(play: Any) -> None:
    row = {"prompt": "Play.\n", "game": "TowerOfHanoi-v0-raw", "seed": 0}
    moves = "[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"
    episode = play(row, *moves)
    assert "C: [3]" in episode["turns"][3]["answer"] and episode["value"] == 1.0


def test_games_at_once_in_threads_are_what_they_are_alone() -> None:
    kind, _ = load_environment(PATH)

    def played(seed: int) -> list[str]:
        game: Any = kind()
        said = [game.reset({"game": "2048-v0-raw", "seed": seed})]
        for move in ["[left]", "[up]", "[right]", "[down]"] * 5:
            answer = game.step(move)
            if isinstance(answer, Done):
                break
            said.append(answer.text)
        return said

    with ThreadPoolExecutor(8) as threads:
        at_once = list(threads.map(played, range(16)))
    assert at_once == [played(seed) for seed in range(16)]
    assert len({tuple(one) for one in at_once}) == 16
