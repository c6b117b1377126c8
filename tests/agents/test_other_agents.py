"""Agents that nobody here wrote, as their packages have them: each asks the gateway, acts, and is trained."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.agents.played import EXAMPLES, play

import millrace
from millrace.conversations.tokenizer import ASSISTANT, END
from millrace.quickstart.start_model import learn

VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
CALL = "multiply(12, 34)"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 408"
TEXTS = {
    "with_inspect": [CALL, 'submit("408")'],
    "with_langgraph": [CALL, "408"],
    "with_mini_swe_agent": ['bash("expr 12 \\\\* 34")', f'bash("{DONE}")'],
    "with_pydantic_ai": [CALL, "408"],
    "with_smolagents": [CALL, 'final_answer("408")'],
}
"""What a model says that solves the task, turn by turn."""
ROW = {"prompt": "12*34=", "answer": "408"}


@pytest.mark.parametrize("agent", sorted(TEXTS))
def test_an_agent_acts_and_its_reward_is_that_of_a_right_answer(
    agent: str, model: Path, tmp_path: Path
) -> None:
    played = play(agent, tmp_path, model, TEXTS[agent], ROW, VARIABLES)
    assert len(played.calls) == 2
    assert "408" in played.calls[1].messages[-1].content  # what its tool said


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says one of the texts, whatever it is asked."""
    directory, rng = tmp_path_factory.mktemp("start"), random.Random(0)
    said = sorted({text for texts in TEXTS.values() for text in texts} | {"hm"})
    learn(
        [(_anything(rng), rng.choice(said)) for _ in range(2000)],
        directory / "base",
        directory / "start",
        Console(),
        alphabet=string.printable,
        steps=150,
        lr=4e-3,
        seed=1,
    )
    config = directory / "start" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 16384'))
    return directory / "start"


def _anything(rng: random.Random) -> str:
    return "".join(rng.choices(string.printable, k=rng.randrange(200))) + END + ASSISTANT


def trained(agent: str, start: Path, directory: Path, **reward: Any) -> Any:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{a}*34=", "answer": str(a * 34)}) + "\n" for a in range(8)))
    run = millrace.train(
        model={"path": str(start)},
        task={"kind": "file", "path": str(rows), "answer": None},
        reward={
            "kind": "environment",
            "path": f"{EXAMPLES / agent}.py:reward",
            "agent": {"function": f"{EXAMPLES / agent}.py:solve", "variables": VARIABLES},
            "turns": 4,
            "timeout_s": 120.0,
            "memory_mb": 4096,
            **reward,
        },
        run_dir=directory / "run",
        steps=3,
        batch={"prompts": 2, "group_size": 4},
        sampling={"max_tokens": 80},
        schedule={"kind": "synchronous"},
        rollout={"max_sequence_tokens": 8192, "slots": 8},
    )
    return run


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("agent", sorted(TEXTS))
def test_a_run_trains_an_agent_as_its_package_has_it(agent: str, start: Path, tmp_path: Path) -> None:
    run = trained(agent, start, tmp_path)
    accounting = run.summary()["accounting"]
    print(accounting)
    for one in run.trajectories(tokens=True):
        print({k: v for k, v in one.items() if k.startswith("reward") and v}, one.get("finish"), len(one["tokens"]), one["completion"][:100])
    assert accounting["trained"] == accounting["admitted"] == 3 * 2 * 4
