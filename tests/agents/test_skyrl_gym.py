"""An environment of the package `skyrl-gym` is played as it is, by the path of its class."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.call_reader import CallReader
from millrace.episodes.environment import Done, Environment, Observation
from millrace.episodes.forms import Form, load_environment

PATH = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
ROW: Any = {"prompt": "13*7=", "reward_spec": {"ground_truth": "91"}}


def made() -> Environment:
    kind, _ = load_environment(PATH)
    config = EnvironmentRewardSection(path=PATH, turns=2)
    return Form(kind, PATH, config, prompt="prompt", reader=CallReader(), shown=False)()


def test_an_environment_of_skyrl_gym_answers_and_scores() -> None:
    environment = made()
    assert environment.reset(ROW) == ""
    asked = environment.step("I think #### 90")
    assert isinstance(asked, Observation) and asked.reward == pytest.approx(0.1)
    assert "exact format" in asked.text[0]["content"]
    assert environment.step("So #### 91") == Done(1.0, {"steps": 2.0})
    environment.close()


def test_its_turns_end_with_those_of_the_run() -> None:
    environment = made()
    environment.reset(ROW)
    environment.step("hm")
    assert environment.step("hm") == Done(0.0, {"steps": 2.0})
    environment.close()
