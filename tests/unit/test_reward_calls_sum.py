"""A sum of rewards: values, metrics, failures and deadlines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.config.freeze import recorded
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.config.tables.task import (
    ExactRewardSection,
    FileTaskSection,
    FunctionRewardSection,
    SumRewardSection,
)
from millrace.core.errors import ConfigError, DeadlineExceeded, RewardError
from millrace.core.types import Abstain, Failed, Scored
from millrace.episodes.reward_worker import make_answer
from millrace.rewards.reward_calls import make_calls
from millrace.run.resume import check_resume
from millrace.tasks.tasks import make_task

CODE = """
import asyncio, pathlib, time

def short(completion):
    return {"reward": 0.5, "length": len(completion)}

def fails(completion):
    return 1 / 0

def abstains(completion):
    return None

def hangs(completion):
    end = time.monotonic() + 60
    while completion == "hang" and time.monotonic() < end and not pathlib.Path(__file__ + ".go").exists():
        time.sleep(0.01)
    return 1.0

async def later(completion):
    await asyncio.sleep(3 if completion == "wait" else 0.001)
    return 1.0

def large(completion):
    return 1e16
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2 =", "answer": "4"}) + "\n")
    (tmp_path / "own.py").write_text(CODE)
    return make_task(FileTaskSection(path=str(tmp_path / "rows.jsonl")), None)


def section(
    tmp_path, *members: str, weights: tuple[float, ...] = (), leave_out: str = "never", **keys: Any
) -> SumRewardSection:
    rewards = {
        "exact": {"kind": "exact"},
        "pattern": {"kind": "exact", "extract": "("},
        **{name: {"kind": "function", "path": f"{tmp_path / 'own.py'}:{name}"} for name in NAMES},
    }
    each = [
        {"name": name, "weight": weight, "leave_out": leave_out, "reward": rewards[name]}
        for name, weight in zip(members, weights or (1.0,) * len(members), strict=True)
    ]
    return SumRewardSection.model_validate({"members": each} | keys)


NAMES = ("short", "fails", "abstains", "hangs", "later", "large", "nowhere")


def score(config, task, completion="4"):
    calls = make_calls(config, task, None)
    return asyncio.run(calls.score(completion, "4", {"prompt": "2 + 2 =", "answer": "4"}))


def test_the_reward_is_the_weighted_sum_and_each_member_is_a_metric(tmp_path, task):
    config = section(tmp_path, "exact", "short", "later", weights=(2.0, -1.0, 0.25))
    assert score(config, task) == Scored(
        1.75, {"exact": 1.0, "short": 0.5, "short/length": 1.0, "later": 1.0}
    )
    assert score(config, task, "five").value == -0.25


@pytest.mark.parametrize("members", [("exact", "fails"), ("fails", "exact"), ("later", "fails")])
def test_a_member_that_fails_fails_the_sum_and_is_named(tmp_path, task, members):
    failed = score(section(tmp_path, *members), task)
    assert isinstance(failed, Failed) and failed.reason.startswith("fails: ")
    assert "ZeroDivisionError" in failed.reason


def test_a_member_that_abstains_makes_the_sum_abstain(tmp_path, task):
    abstains = score(section(tmp_path, "exact", "abstains"), task)
    assert isinstance(abstains, Abstain) and abstains.reason.startswith("abstains: ")


def test_a_member_without_an_opinion_may_be_left_out_and_its_share_is_a_metric(tmp_path, task):
    config = section(tmp_path, "exact", "abstains", weights=(2.0, 5.0), leave_out="abstained")
    assert score(config, task) == Scored(
        2.0, {"exact": 1.0, "exact/abstained": 0.0, "abstains/abstained": 1.0}
    )
    assert isinstance(score(section(tmp_path, "fails", "exact", leave_out="abstained"), task), Failed)


def test_a_member_that_fails_may_be_left_out_and_its_first_reason_is_in_the_log(tmp_path, task, caplog):
    config = section(tmp_path, "fails", "short", leave_out="failed")
    calls = make_calls(config, task, None)

    async def twice():
        return [await calls.score("4", "4", {}) for _ in range(2)]

    first, second = asyncio.run(twice())
    assert first == second and first.value == 0.5
    shares = {key: value for key, value in first.metrics.items() if key.endswith(("failed", "abstained"))}
    assert shares == {
        "fails/failed": 1.0,
        "fails/abstained": 0.0,
        "short/failed": 0.0,
        "short/abstained": 0.0,
    }
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_sum_whose_members_are_all_left_out_is_no_zero(tmp_path, task):
    fails = score(section(tmp_path, "abstains", "fails", leave_out="failed"), task)
    assert isinstance(fails, Failed) and fails.reason.startswith("fails: ")
    assert isinstance(score(section(tmp_path, "abstains", leave_out="abstained"), task), Abstain)


def test_a_sum_that_is_too_large_is_a_failure(tmp_path, task):
    assert isinstance(score(section(tmp_path, "large", weights=(10.0,)), task), Failed)


def test_the_deadline_is_that_of_all_members_and_a_lost_thread_ends_the_worker(tmp_path, task):
    waits = score(section(tmp_path, "hangs", "later", timeout_s=2.0), task, "wait")
    assert isinstance(waits, Failed) and waits.reason.startswith("later: ")
    config = section(tmp_path, "hangs", "later", timeout_s=0.2)
    began = time.monotonic()

    async def hang():
        with pytest.raises(DeadlineExceeded, match=r"hangs: |longer than `reward.timeout_s`"):
            await make_calls(config, task, None).score("hang", "4", {})
        (tmp_path / "own.py.go").touch()

    asyncio.run(hang())
    assert time.monotonic() - began < 60


def test_it_answers_what_its_first_member_extracts(tmp_path):
    config = section(tmp_path, "exact", "short")
    one = config.members[0].model_copy(update={"reward": ExactRewardSection(extract="= (.+)")})
    assert make_answer(config.model_copy(update={"members": (one,)}))("1 + 1 = 2") == "2"


@pytest.mark.parametrize(("member", "error"), [("pattern", ConfigError), ("nowhere", RewardError)])
def test_a_member_that_cannot_be_made_is_named(tmp_path, task, member, error):
    with pytest.raises(error, match=rf"`reward.members` \({member}\): "):
        make_calls(section(tmp_path, "exact", member), task, None)


# ---------------------------------------------------------------- its keys

TOML = """
[model]
path = "model"

[task]
kind = "file"
path = "rows.jsonl"

[reward]
kind = "sum"
timeout_s = 5.0

[[reward.members]]
name = "right"
weight = 2
reward = { kind = "exact", extract = "none" }

[[reward.members]]
name = "own"
reward = { kind = "function", path = "own.py:short" }
"""


def configured(tmp_path: Path, text: str = TOML) -> Config:
    (tmp_path / "run.toml").write_text(text)
    return load(tmp_path / "run.toml")


def test_members_are_tables_of_the_file_whose_paths_are_relative_to_it(tmp_path):
    config = configured(tmp_path)
    assert config.reward == SumRewardSection.model_validate(
        {
            "timeout_s": 5.0,
            "members": [
                {"name": "right", "weight": 2.0, "reward": ExactRewardSection()},
                {"name": "own", "reward": FunctionRewardSection(path=f"{tmp_path}/own.py:short")},
            ],
        }
    )
    assert Config.model_validate(recorded(config)) == config, "as a worker gets it"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "own"', 'name = "right"', r"`reward.members` \(right\): the name is taken"),
        ('name = "own"', 'name = "turn_1"', r"`reward.members` \(turn_1\): the name is taken"),
        ("weight = 2", "weight = 0", r"`reward.members` \(right\): `weight` is 0"),
        (
            '"own.py:short"',
            '"own.py:short", timeout_s = 3.0',
            r"\(own\): `timeout_s` is a limit of the whole",
        ),
        ('kind = "exact", ', 'kind = "gym", ', r"`reward.members` \(right\): `reward.kind` \"gym\" needs"),
        (
            'kind = "exact", ',
            'kind = "exakt", ',
            r"`reward.members\[0\].reward.kind` .* Did you mean 'exact'",
        ),
        ('extract = "none"', "extrakt = 1", r"unknown key `reward.members\[0\].reward.extrakt`"),
        ("[[reward.members]]", "[[reward.member]]", r"`reward.members`"),
    ],
)
def test_an_error_names_the_member(tmp_path, old, new, message):
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, TOML.replace(old, new))
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


def test_members_stay_when_a_run_is_resumed(tmp_path):
    config = configured(tmp_path)
    check_resume(config, configured(tmp_path, TOML.replace("timeout_s = 5.0", "timeout_s = 6.0")))
    with pytest.raises(ConfigError, match=r"reward.members.right.weight"):
        check_resume(config, configured(tmp_path, TOML.replace("weight = 2", "weight = 3")))
