"""Whole runs of agents that ask by HTTP. Processes are killed with SIGKILL in the middle of a turn."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_run_turns import Killer, check, failures, plan, resumed_to_the_end, trained
from tests.long import few, long
from tests.runs import events, summary, train, weights
from tests.turn_runs import make_agent_start

from millrace.config.load import load
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.errors import DataError
from millrace.core.types import Finish
from millrace.episodes.agents.agent_process import DIRECTORY
from millrace.evaluation.evaluate import evaluate
from millrace.evaluation.trials import play
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace_curation.curate import CurationOptions, curate

pytestmark = pytest.mark.usefixtures("warm")
SAMPLES = 2


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    return make_agent_start(tmp_path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory, warm) -> RunDirectory:
    """The run when nothing is killed."""
    directory = tmp_path_factory.mktemp("calm")
    return train(make_agent_start(directory), directory / "run")


@long
def test_what_an_agent_asked_and_heard_is_what_is_trained(calm):
    tokenizer = load_tokenizer(calm.model)
    forked = 0
    for one in trained(calm):
        columns, stretches = one.columns, one.columns.turns()
        observed = [
            tokenizer.decode(columns.tokens[a:b].tolist()) for a, b, sampled in stretches if not sampled
        ]
        assert all(text.endswith("<|assistant|>") for text in observed)
        assert len(columns.forks) >= one.metrics["forks_other"] + one.metrics["forks_history"]
        forked += len(columns.forks)
        assert one.metrics["calls_refused"] == 0 and one.metrics["turns"] in (1, 2, 3, 4)
    assert forked
    for step in events(calm, "step"):
        assert [gap[1] < 1e-4 for gap in step.fields["logprob_gap"].values()] == [True]
    assert not (calm.path / DIRECTORY).exists()


@pytest.mark.parametrize("seed", few([1, 2]))
def test_agents_killed_in_a_turn_change_nothing(seed, agents, calm, tmp_path):
    at = plan(agents, "held", seed, 4)
    with Killer(tmp_path) as killer:
        run = train(agents, tmp_path / "run", sinks=(killer,))
    assert len(killer.killed) >= 2 and set(killer.killed) <= set(at)
    assert not events(run, "worker_died")
    check(run, calm)


@long
def test_gateways_killed_in_a_turn_change_nothing(agents, calm, tmp_path):
    at = plan(agents, "held", 3, 3)
    with GatewayKiller(tmp_path) as killer:
        run = train(agents, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    assert killer.killed and set(killer.killed) <= set(at)
    assert events(run, "worker_died")
    check(run, calm)


@long
def test_a_controller_killed_in_a_turn_of_an_agent_resumes_the_same(agents, calm, tmp_path):
    at = plan(agents, "controller", 5, 3)
    run, kills = resumed_to_the_end(agents, tmp_path)
    assert 1 <= kills <= len(at)
    check(run, calm)


@long
def test_an_agent_that_is_a_command_does_the_same(agents, calm, tmp_path):
    text = agents.read_text()
    command = f'command = ["{sys.executable}", "{tmp_path}/acting_agent.py"]'
    text = text.replace('function = "acting_agent.py:solve"', command)
    agents.write_text(text.replace("acting_agent.py:reward", "acting_agent.py:printed"))
    run = train(agents, tmp_path / "run", "steps=1")
    assert [one.reward for one in trained(run)] == [one.reward for one in trained(calm)[:16]]
    assert [one.columns for one in trained(run)] == [one.columns for one in trained(calm)[:16]]


MOST = 4  # tokens that an agent with bounds asks for, or fewer


def bounded(config: Path) -> Path:
    """The agent asks for at most 2 to 4 tokens, and for another stop string. It acts on what ended a turn."""
    agent = config.parent / "acting_agent.py"
    text = agent.read_text()
    for old, new in (
        (
            '"messages": messages}',
            '"messages": messages, "max_tokens": most(messages), "stop": ["ab"]}',
        ),
        ("said.append(reply)", "said.append(reply + ended[-1])"),
        ("    return str(", OBEYED + "    return str("),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    agent.write_text(text.replace("HERE = ", BEGIN + "HERE = "))
    return config


BEGIN = """
def most(messages):
    return 2 + len(messages) % 3

ended = []
"""
OBEYED = """
    choice = data["choices"][0]
    assert data["usage"]["completion_tokens"] <= most(messages)
    assert "ab" not in choice["message"]["content"]
    ended.append(choice["finish_reason"])
"""


@pytest.fixture(scope="module")
def calm_bounded(tmp_path_factory, warm) -> RunDirectory:
    directory = tmp_path_factory.mktemp("calm_bounded")
    return train(bounded(make_agent_start(directory)), directory / "run")


@long
def test_a_turn_has_no_more_tokens_than_its_request_asks_for(calm_bounded):
    tokenizer, ends = load_tokenizer(calm_bounded.model), set()
    for one in trained(calm_bounded):
        assert one.finish is Finish.STOP and one.metrics["turns"] in (3, 4)
        turns = [one.columns.tokens[start:stop] for start, stop, sampled in one.columns.turns() if sampled]
        assert len(turns[0]) <= 3 and max(map(len, turns)) <= MOST  # the run permits 16
        for ids in turns:
            text = tokenizer.decode(ids.tolist())
            ended = tokenizer.eos_token_id == ids[-1], text.endswith("ab"), len(ids)
            assert True in ended[:2] or len(ids) in (2, 3, MOST)
            ends.add(ended)
    assert {(False, False, length) for length in (2, 3, MOST)} | {(False, True, 2)} <= ends
    assert weights(calm_bounded)


@long
def test_bounds_of_turns_outlive_a_killed_controller(agents, calm_bounded, tmp_path):
    at = plan(bounded(agents), "controller", 6, 3)
    run, kills = resumed_to_the_end(agents, tmp_path)
    assert 1 <= kills <= len(at)
    check(run, calm_bounded)


@long
def test_bounds_of_turns_outlive_a_killed_gateway(agents, calm_bounded, tmp_path):
    at = plan(bounded(agents), "held", 7, 3)
    with GatewayKiller(tmp_path) as killer:
        run = train(agents, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    assert killer.killed and set(killer.killed) <= set(at)
    check(run, calm_bounded)


@long
def test_agents_that_fail_have_reasons_and_the_run_goes_on(agents, tmp_path):
    (tmp_path / "acting_agent.py").write_text(
        (tmp_path / "acting_agent.py")
        .read_text()
        .replace("        harm(", '        assert not reply.startswith("a"), "never an a"\n        harm(')
    )
    run = train(agents, tmp_path / "run", "steps=2")
    failed = failures(run)
    assert failed and all("never an a" in one["reason"] and "exit code 1" in one["reason"] for one in failed)
    assert weights(run)


OWN_REQUEST = """drawn = os.urandom(8).hex().translate(LETTERS)
    with (HERE / "starts").open("a") as file:
        file.write(f"{row['number']} ")
    messages = [{"role": "user", "content": row["prompt"] + drawn}]"""


def with_own_requests(config: Path) -> Path:
    """Each agent asks something of its own first, and writes its row when it starts. No row comes twice."""
    agent, rows = config.parent / "acting_agent.py", config.parent / "acting.py"
    asked, lengths = 'messages = [{"role": "user", "content": row["prompt"]}]', '"b" * length + ">"'
    assert asked in agent.read_text() and f"{lengths}" in rows.read_text()
    agent.write_text(agent.read_text().replace(asked, OWN_REQUEST))
    text = rows.read_text().replace(lengths, '"b" * (length % 8 + 1) + ">"')
    rows.write_text(text.replace("range(1, 9)", "range(1, 99)"))
    return config


def test_agents_that_ask_something_of_their_own_train_and_start_once(agents, tmp_path):
    run = train(with_own_requests(agents), tmp_path / "run", "steps=2")
    check_own_prompts(run)
    found = starts(tmp_path)
    with LedgerReader(run.ledger) as reader:
        numbers = [int(group.row_id.rpartition(":")[2]) + 1 for group in reader.groups()]
    assert [found[number] for number in numbers] == [4] * len(numbers)


def test_each_agent_of_an_evaluation_starts_once(agents, tmp_path):
    config = load(with_own_requests(agents), [])
    rows = tmp_path / "acting.py"
    rows.write_text(rows.read_text().replace("range(1, 99)", "range(1, 5)"))
    result = evaluate(config, prompts=3, samples=SAMPLES)
    assert result.num_prompts == 3 and result.num_unscored == 0
    assert sorted(starts(tmp_path).values()) == [1 + SAMPLES] * 3
    (tmp_path / "starts").unlink()
    assert play(config, ["a", "b"])["turns"] and sum(starts(tmp_path).values()) == 1
    (tmp_path / "starts").unlink()
    options = CurationOptions(samples=SAMPLES, keep_hard=True, keep_easy=True, near=None)
    rates = curate(config, options, tmp_path / "attempts.sqlite").rates
    assert all(rate.scored == SAMPLES for rate in rates.values())
    assert starts(tmp_path) == dict.fromkeys(range(1, 5), SAMPLES) and len(rates) == 4


def test_an_evaluation_whose_agents_ask_nothing_says_why(agents, tmp_path):
    agent = "def solve(row):\n    assert row is None\n\ndef reward(end): ..."
    (tmp_path / "acting_agent.py").write_text(agent)
    with pytest.raises(DataError, match=r"no episode has begun; .* ended without a call: .*AssertionError"):
        evaluate(load(agents, []), prompts=2, samples=1)


def test_each_agent_of_an_evaluation_in_a_run_starts_once(agents, tmp_path):
    rows = with_own_requests(agents).parent / "acting.py"
    others = "\n\ndef others():\n    return [{'prompt': 'a>', 'number': 1000 + one} for one in range(4)]\n"
    rows.write_text(rows.read_text() + others)
    agent = tmp_path / "acting_agent.py"  # one of the rows has an agent that never asks
    told = "    said: list[str] = []\n"
    assert told in agent.read_text()
    agent.write_text(agent.read_text().replace(told, f"{told}    assert row['number'] != 1003, 'no'\n"))
    task = f'{{ kind = "function", path = "{rows}:others", answer = "none" }}'
    evaluation = f'{{ name = "held-out", every = 1, prompts = 4, samples = {SAMPLES}, task = {task} }}'
    run = train(agents, tmp_path / "run", "steps=2", f"evaluations=[{evaluation}]")
    versions = [event.fields["version"] for event in events(run, "evaluated")]
    found = starts(tmp_path)
    assert versions and [found[1000 + one] for one in range(4)] == [len(versions) * (1 + SAMPLES)] * 4
    with LedgerReader(run.ledger) as reader:
        attempts = reader.attempts("held-out", versions[-1])
    failed = [one.reason for one in attempts if one.reward is None]
    assert len(failed) == 1 + SAMPLES and all("no" in reason for reason in failed)


def starts(directory: Path) -> Counter[int]:
    """How often an agent of each row started."""
    return Counter(map(int, (directory / "starts").read_text().split()))


def test_agents_that_ask_something_else_after_a_kill_begin_again(agents, tmp_path):
    at = plan(with_own_requests(agents), "held", 3, 3)
    with GatewayKiller(tmp_path) as killer:
        run = train(agents, tmp_path / "run", "supervision.restarts=100", sinks=(killer,))
    assert killer.killed and set(killer.killed) <= set(at)
    assert any("asks something else" in one.fields["reason"] for one in events(run, "restarted"))
    check_own_prompts(run)


def check_own_prompts(run: RunDirectory) -> None:
    """All is trained, from prompts of which members of a group share the begin; and nothing is left."""
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] > 0
    tokenizer, own = load_tokenizer(run.model), 0
    with LedgerReader(run.ledger) as reader:
        for group in reader.groups():
            for one in group.members:
                columns = one.columns
                begins = [fork for fork in columns.forks if fork.start == 0]
                own += len(begins)
                whole = (
                    [*group.prompt[: begins[0].kept], *columns.tokens[: columns.prompt_end]]
                    if begins
                    else group.prompt
                )
                assert tokenizer.decode(list(whole)).endswith("<|assistant|>")
    assert own > accounting["trained"] // 2
    for step in events(run, "step"):
        assert [gap[1] < 1e-4 for gap in step.fields["logprob_gap"].values()] == [True]
    counts = events(run, "step")[-1].fields["episodes"]
    assert counts["ended"] and not counts.keys() - {
        "open",
        "ended",
        "other_tokens",
        "forgotten",
        "lost_with_worker",
    }
    assert not (run.path / DIRECTORY).exists()


class GatewayKiller(Killer):
    """Kills the reward worker whose agent is held, and so the gateway."""

    def _kill(self, point: int, pid: int) -> None:
        worker = ancestors(pid) & {self._pids[name] for name in self._pids if name.startswith("reward")}
        for one in worker:
            os.kill(one, signal.SIGKILL)
            self.killed.append(point)


def ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            break
    return found


def test_a_refused_request_is_counted(agents, tmp_path):
    text = (tmp_path / "acting_agent.py").read_text()
    ask = "        reply = ask(connection, key, messages)\n"
    assert ask in text
    asking = (
        '        body = json.dumps({"model": "policy", "messages": messages, "n": 2})\n'
        '        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}\n'
        '        connection.request("POST", "/v1/chat/completions", body, headers)\n'
        '        assert b"more than one turn" in connection.getresponse().read()\n'
    )
    (tmp_path / "acting_agent.py").write_text(text.replace(ask, asking + ask))
    run = train(agents, tmp_path / "run", "steps=1")
    assert all(one.metrics["calls_refused"] == one.metrics["turns"] for one in trained(run))
