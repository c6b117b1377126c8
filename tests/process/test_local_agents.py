"""Agents of a worker: the gateway's address, a key each, and a task directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.chat_templates import STYLES, make_tokenizer

from millrace.config.tables.reward_kinds import AgentSection
from millrace.core.errors import DataError
from millrace.episodes.gateway.local_agents import LocalAgents, WorkersDirectory
from millrace.episodes.gateway.rendering import make_rendering

ASKS = """
import http.client, json, os, urllib.parse
row = json.load(open(os.environ["MILLRACE_ROW"]))
url = urllib.parse.urlsplit(os.environ["ANTHROPIC_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc, timeout=30)
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}
body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": row["instruction"]}]}
connection.request("POST", "/v1/messages/count_tokens", json.dumps(body), headers)
open("answer.txt", "w").write(str(json.load(connection.getresponse())["input_tokens"]))
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task in Harbor's form. Its test wants the answer that the file of the environment has."""
    path = tmp_path / "task"
    for directory in "environment", "tests":
        (path / directory).mkdir(parents=True)
    (path / "instruction.md").write_text("the end")
    (path / "environment" / "due.txt").write_text("more than 0")
    (path / "tests" / "test.sh").write_text(
        'test -f due.txt && test "$(cat answer.txt)" -gt 0 && echo 1 > /logs/verifier/reward.txt'
    )
    return path


def test_an_agent_gets_its_task_and_the_tests_see_what_it_left(tmp_path: Path, task: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = next(iter(STYLES.values())).template
    config = AgentSection(command=(sys.executable, "-c", ASKS.replace("{", "{{").replace("}", "}}")),
                          task_directory="task")  # fmt: skip
    agents = LocalAgents(config, make_rendering(tokenizer, {}), tmp_path / "agents")
    agent = agents.start({"task": str(task)})
    end = agent.wait(60)
    assert end is not None and end.exit_code == 0, end
    assert agent.tests() == 1.0
    assert agent.session.counts.auxiliary == 1 and agent.session.counts.calls == 0
    agent.close()
    assert not list((tmp_path / "agents").iterdir())


def test_a_row_without_its_task_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    config = AgentSection(command=("true",), task_directory="task")
    agents = LocalAgents(config, make_rendering(tokenizer, {}), tmp_path / "agents")
    with pytest.raises(DataError, match=r"instruction\.md|task"):
        agents.start({"task": str(tmp_path / "nothing")})
    with pytest.raises(DataError, match="`task`"):
        agents.start({"prompt": "x"})


def test_the_agents_of_a_worker_that_is_gone_leave_no_directory_behind_the_next_start(tmp_path: Path) -> None:
    gone, lives = WorkersDirectory(tmp_path / "agents"), WorkersDirectory(tmp_path / "agents")
    for one in gone, lives:
        (one.path / "agent-1" / "work").mkdir(parents=True)
    gone.close()
    new = WorkersDirectory(tmp_path / "agents")
    assert {*(tmp_path / "agents").iterdir()} == {lives.path, new.path}
    assert (lives.path / "agent-1" / "work").is_dir()
