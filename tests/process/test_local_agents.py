"""Agents of a worker: the gateway's address, a key each, and a task directory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.chat_templates import STYLES, make_tokenizer

from millrace.config.tables.generation import SamplingConfig
from millrace.config.tables.reward_kinds import AgentSection
from millrace.config.tables.task import EnvironmentRewardSection, FileTaskSection
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError
from millrace.core.types import Failed, Finish, ScoreRequest
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.environment import Budgets
from millrace.episodes.episodes import Episodes
from millrace.episodes.gateway.agent_environment import AgentEnvironment, AgentParts, make_agent_episodes
from millrace.episodes.gateway.calls import Call, RefusedCall
from millrace.episodes.gateway.local_agents import LocalAgents, WorkersDirectory
from millrace.episodes.gateway.rendering import make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.open_episodes import Cause
from millrace.episodes.snapshots import Snapshots
from millrace.tasks.tasks import make_task

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


def test_an_agent_cannot_name_a_token_that_the_model_lacks(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer) - 1}))
    (tmp_path / "own.py").write_text("def reward(end): return 0.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    task = FileTaskSection(path=str(tmp_path / "rows.jsonl"), answer=None)
    reward = EnvironmentRewardSection(
        path=f"{tmp_path / 'own.py'}:reward", agent=AgentSection(command=("true",))
    )
    model = str(tmp_path / "model")
    some = make_agent_episodes(
        reward, task, make_task(task, tokenizer), tokenizer, SamplingConfig(), None, model
    )
    environment = some._kind()
    with pytest.raises(RefusedCall, match=f"token ids are from 0 to {len(tokenizer) - 2}"):
        environment._check(Call(prompt="x", stop_ids=[len(tokenizer) - 1]))  # type: ignore[attr-defined]


def test_the_agents_of_a_worker_that_is_gone_leave_no_directory_behind_the_next_start(tmp_path: Path) -> None:
    gone, lives = WorkersDirectory(tmp_path / "agents"), WorkersDirectory(tmp_path / "agents")
    for one in gone, lives:
        (one.path / "agent-1" / "work").mkdir(parents=True)
    gone.close()
    new = WorkersDirectory(tmp_path / "agents")
    assert {*(tmp_path / "agents").iterdir()} == {lives.path, new.path}
    assert (lives.path / "agent-1" / "work").is_dir()


SLEEPS = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a')); time.sleep(3600)"
SOON_S = 60.0


def test_agents_that_are_forgotten_while_they_start_end_at_once(tmp_path: Path) -> None:
    tokenizer, started = make_tokenizer(tmp_path / "tokenizer"), tmp_path / "started"
    rendering, directory = make_rendering(tokenizer, {}), tmp_path / "agents"
    started.touch()
    agents = LocalAgents(
        AgentSection(command=(sys.executable, "-c", SLEEPS, str(started))), rendering, directory
    )
    replies = Replies(tokenizer, end_ids=set(), stop=())
    parts = AgentParts(agents, rendering, replies, lambda end, row: 0.0, timeout_s=3600.0, end_s=60.0,
                       max_tokens=9, stop=(), num_tokens=len(tokenizer))  # fmt: skip

    def made() -> AgentEnvironment:
        return AgentEnvironment(parts)

    made.wants_ids = True  # type: ignore[attr-defined]
    some = Episodes(made, name="agent", file=None, bridge=PlainBridge(tokenizer), decode=tokenizer.decode,
                    budgets=Budgets(8), snapshots=Snapshots(None, 0), timeout_s=3600.0)  # type: ignore[arg-type]  # fmt: skip
    first, ahead, asked = [ScoreRequest(one, 0, token_array(), Finish.TURN) for one in range(3)]

    async def forgotten() -> list[object]:
        calls = some.begun({}, [first, ahead]), some.answered(replace(asked, begins=True), {})
        tasks = [asyncio.ensure_future(call) for call in calls]
        while len(started.read_text().split()) < 3:  # noqa: ASYNC110 - other processes write
            await asyncio.sleep(0.01)
        some.forget([0, 1, 2])
        async with asyncio.timeout(SOON_S):
            return [await task for task in tasks]

    assert all(isinstance(answer, Failed) for answer in asyncio.run(forgotten()))
    deadline_s = time.monotonic() + SOON_S
    while len(some.open):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert some.open.closed == {Cause.FAILED: 3}
    assert not list(directory.iterdir()) and not agents._sessions
    for pid in map(int, started.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
