"""examples/turns.py: its environments answer as they say, and both tasks run to the end."""

from __future__ import annotations

import argparse
import random
import runpy
from pathlib import Path

import pytest
from tests.long import long

from millrace import Done, Observation

TURNS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "turns.py"))


def test_a_search_of_five_guesses_finds_every_letter():
    for row in TURNS["secrets"]():
        environment, low, high = TURNS["Search"](), 0, len(TURNS["LETTERS"])
        environment.reset(row)
        for _ in range(TURNS["TASKS"]["search"].turns):
            middle = (low + high) // 2
            answer = environment.step(TURNS["LETTERS"][middle])
            if isinstance(answer, Done):
                break
            low, high = (middle + 1, high) if answer.text == "+" else (low, middle)
        assert answer == Done(1.0)


def test_the_calculator_gives_the_answer_and_rewards_nothing_else():
    (row, *_), environment = TURNS["products"](), TURNS["Calculator"]()
    environment.reset(row)
    assert environment.step(f"calc {row['prompt'][:-1]}").text.strip() == row["answer"]
    assert isinstance(environment.step("calc nothing"), Observation)
    assert environment.step(row["answer"]).reward == 1
    assert environment.step("7").reward == 0


@pytest.mark.parametrize("task", ["search", "calculator"])
def test_demonstrations_have_turns_of_one_token_alphabet(task):
    rng = random.Random(0)
    pairs = [pair for _ in range(50) for pair in TURNS["TASKS"][task].demonstrations(rng)]
    assert any(TURNS["END"] in prompt for prompt, _ in pairs) and all(said for _, said in pairs)


@long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("task", ["search", "calculator"])
def test_the_example_trains(task, tmp_path):
    args = argparse.Namespace(seed=0, steps=2, warm_start_steps=30, lr=None, schedule="millrace")
    run = TURNS["train"](task, tmp_path, args)
    assert run.summary()["accounting"]["trained"] == 2 * 8 * TURNS["TASKS"][task].prompts
