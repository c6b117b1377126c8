"""examples/tiny.py: its rows mean what they say, and both tasks run to the end."""

from __future__ import annotations

import argparse
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.long import long

from millrace.config.tables.task import CodeRewardSection, MathRewardSection
from millrace.core.errors import SandboxError
from millrace.rewards.rewards import make_reward

TINY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tiny.py"))


@pytest.mark.parametrize(
    ("tasks", "section"), [("functions", CodeRewardSection()), ("questions", MathRewardSection())]
)
def test_what_is_shown_as_right_earns_everything_and_most_mistakes_nothing(tasks, section):
    try:
        reward = make_reward(section, SimpleNamespace(prompt="prompt"))
    except SandboxError as error:
        pytest.skip(str(error))
    chosen = random.Random(0).sample(list(TINY[tasks]()), 24)
    earned = []
    for row, right, mistakes in chosen:
        assert all(value(reward(text, row["answer"], row)) == 1 for text in right), row
        earned += [value(reward(text, row["answer"], row)) for text in mistakes]
    assert earned.count(0) >= 0.9 * len(earned)


def value(returned):
    return returned["reward"] if isinstance(returned, dict) else returned


@long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("task", ["code", "maths"])
def test_the_example_trains_and_measures(task, tmp_path):
    args = argparse.Namespace(seed=0, steps=2, warm_start_steps=2)
    run = TINY["train"](task, tmp_path, args)
    assert run.summary()["accounting"]["trained"] == 128
    assert [one["version"] for one in run.evaluations()] == [0, 2]
