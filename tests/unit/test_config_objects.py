"""A user's own algorithm, schedule, rows and reward, named by path in a configuration."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from millrace import algorithms
from millrace.config.load import load
from millrace.config.objects import load_function
from millrace.core.errors import ConfigError
from millrace.rewards.rewards import make_reward
from millrace.schedule import presets
from millrace.tasks.tasks import make_task

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "model.path=anywhere"


def own(*overrides: str):
    return load(EXAMPLES / "environment.toml", (MODEL, *overrides))


def test_an_own_algorithm_is_taken_from_its_file():
    config = own("algorithm.kind=function", f"algorithm.path={EXAMPLES / 'algorithm.py'}:CISPO")
    assert algorithms.build(config.algorithm).objective.__name__ == "cispo_objective"


def test_an_own_schedule_is_made_from_the_configuration():
    config = own(
        "schedule.kind=function",
        f"schedule.path={EXAMPLES / 'schedule.py'}:make",
        "schedule.staleness_max=3",
    )
    schedule = presets.build(config)
    assert (schedule.kind, schedule.staleness_max, config.staleness_bound) == ("newest_only", 3, 3)


def test_own_rows_and_their_reward_come_from_one_file():
    config = own()
    task = make_task(config.task, None)
    columns = task.columns(0)
    assert task.rows == 500 and task.prompt_text(0) == columns["prompt"]
    score = make_reward(config.reward, task)
    target = columns["target"]
    assert score(f"{target}+0", None, columns) == 1.0
    assert score("nothing", None, columns) == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("algorithm.kind=function", "algorithm.path=millrace.core.types:State"),
            "not a millrace.algorithms",
        ),
        (("algorithm.kind=function", "algorithm.path=nothing"), "must be `file.py:name`"),
        (("schedule.kind=function", "schedule.path=builtins:dict"), "not a millrace.schedule.Schedule"),
        (
            ("schedule.kind=function", "schedule.path=millrace.nowhere:make"),
            "importing millrace.nowhere failed",
        ),
    ],
)
def test_what_is_not_what_it_should_be_is_refused_by_name(overrides, message):
    config = own(*overrides)
    with pytest.raises(ConfigError, match=message):
        algorithms.build(config.algorithm)
        presets.build(config)


@pytest.mark.parametrize("name", ["own_check", "own-check", "own.check", "json"])
def test_a_spawned_process_finds_the_functions_of_a_file_whose_name_is_free(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{name}.py").write_text("def check(text):\n    return text + '!'\n")
    check, file = load_function("reward.path", f"{tmp_path / name}.py:check")
    assert check("a") == "a!" and file == str(tmp_path / f"{name}.py")
    assert json.loads("1") == 1
    if name in ("json", "own.check"):
        assert check.__module__.startswith("millrace_own_")
        return
    told = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer)('b'))"],
        input=pickle.dumps(check),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert told.stdout == b"b!\n"
