"""An agent's calls are turns of a trajectory, and a lost agent is run again with the recorded turns."""

from __future__ import annotations

import math
import string
import threading
from array import array
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.agent_threads import Ask, Program, ThreadAgent, Worker

from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.completion.forks import Fork
from millrace.core.turns.turn_bounds import TurnBounds
from millrace.core.types import Failed, Finish, Observed, Scored
from millrace.episodes.environment import Ids
from millrace.episodes.gateway.calls import Call, ChatTurn, RefusedCall, Reply
from millrace.episodes.gateway.sessions import PendingCall
from millrace.episodes.open_episodes import Cause
from millrace.tasks.rows import Row

Messages = list[ChatTurn]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(directory, string.ascii_letters + string.digits + " <|>()\n")
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = None
    return tokenizer


def user(text: str) -> ChatTurn:
    return ChatTurn(role="user", content=text)


def two_turns(row: Row, ask: Ask) -> str:
    first = ask(user(row["prompt"]))
    return ask(user(row["prompt"]), first.turn, user("more")).content


def test_calls_are_turns_and_the_end_is_scored(tokenizer: Any) -> None:
    worker = Worker(tokenizer, two_turns)
    request = worker.begin()
    assert tokenizer.decode(list(request.prompt)) == "begin\n"
    request = worker.say(request, "no")
    answer = worker.episodes.answer(request, worker.row)
    assert isinstance(answer, Observed) and tokenizer.decode(list(answer.tokens)) == "more\n"
    end = worker.episodes.answer(worker.say(worker.observe(request, answer), "yes"), worker.row)
    assert isinstance(end, Scored) and end.value == 3.0 and not end.truncated
    assert end.metrics["right"] == 1.0 and end.metrics["said"] == 2.0 and end.metrics["turns"] == 2
    assert len(worker.running) == 1, "the agent that was started for the prompt goes on"
    assert worker.episodes.open.closed == {Cause.ENDED: 1}


def test_a_lost_agent_is_run_again_with_the_recorded_turns(tokenizer: Any) -> None:
    worker = Worker(tokenizer, two_turns)
    request = worker.say(worker.begin(), "no")
    request = worker.say(worker.observe(request, worker.episodes.answer(request, worker.row)), "yes")
    for _ in range(2):
        end = worker.restarted().answer(request, worker.row)
        assert isinstance(end, Scored) and end.value == 3.0


def test_a_repeated_agent_that_asks_something_else_begins_again(tokenizer: Any) -> None:
    asked = iter(range(100))

    def fickle(row: Row, ask: Ask) -> str:
        first = ask(user(row["prompt"]))
        return ask(user(row["prompt"]), first.turn, user(f"more {next(asked)}")).content

    worker = Worker(tokenizer, fickle)
    request = worker.say(worker.begin(), "no")
    request = worker.say(worker.observe(request, worker.episodes.answer(request, worker.row)), "yes")
    worker.episodes = worker.restarted()
    again = worker.episodes.answer(request, worker.row)
    assert again == Observed(token_array(), begins=True), "with the prompt of its group"
    assert len(worker.episodes.open) == 1 and worker.episodes.open.closed == {Cause.OTHER_TOKENS: 1}
    request = worker.say(replace(request, tokens=token_array(), turns=[], logprobs=array("f")), "no")
    assert isinstance(worker.episodes.answer(request, worker.row), Observed)


def killed_before(kills: list[bool]) -> Program:
    """`two_turns`, or the agent is killed before it asks."""

    def killed(row: Row, ask: Ask) -> str:
        if kills.pop(0):
            ask.__self__.kill()  # type: ignore[attr-defined]
            return ""
        return two_turns(row, ask)

    return killed


def test_an_agent_that_was_killed_before_its_first_call_is_run_again_once(tokenizer: Any) -> None:
    kills = [True, False]
    worker = Worker(tokenizer, killed_before(kills))
    request = worker.begin()
    assert isinstance(worker.episodes.answer(worker.say(request, "one"), worker.row), Observed)
    kills += [True, True, True, True]
    failed = worker.episodes.first(worker.row)
    assert isinstance(failed, Failed) and "SIGKILL" in failed.reason and "twice" in failed.reason
    end = worker.restarted().answer(worker.say(request, "one"), worker.row)
    assert isinstance(end, Failed) and "SIGKILL" in end.reason and "twice" in end.reason
    assert not kills


def test_an_agent_that_was_killed_when_a_budget_ended_it_is_run_again_once(tokenizer: Any) -> None:
    kills = [True, False]

    def killed(row: Row, ask: Ask) -> str:
        ask(user(row["prompt"]))
        ask(user(row["prompt"]))
        if kills.pop(0):
            ask.__self__.kill()  # type: ignore[attr-defined]
        return "yes"

    worker = Worker(tokenizer, killed, turns=1)
    end = worker.episodes.answer(worker.say(worker.begin(), "one"), worker.row)
    assert isinstance(end, Scored) and end.truncated and end.value == 2.0


def test_an_agent_that_never_asks_is_closed(tokenizer: Any) -> None:
    worker = Worker(tokenizer, two_turns, timeout_s=1.0)
    request = worker.say(worker.begin(), "one")
    silent = threading.Event()
    worker.agents.program = lambda row, ask: silent.wait(10)
    assert isinstance(worker.restarted().answer(request, worker.row), Failed)
    silent.set()
    assert worker.running[-1].session._ended


def test_an_agent_that_was_killed_is_run_again_once(tokenizer: Any) -> None:
    kills = [True, False]

    def killed(row: Row, ask: Ask) -> str:
        said = two_turns(row, ask)
        if kills.pop(0):
            worker.running[-1].kill()
        return said

    worker = Worker(tokenizer, killed)
    request = worker.say(worker.begin(), "no")
    request = worker.say(worker.observe(request, worker.episodes.answer(request, worker.row)), "yes")
    end = worker.episodes.answer(request, worker.row)
    assert isinstance(end, Scored) and end.value == 3.0
    kills += [True, True]
    end = worker.restarted().answer(request, worker.row)
    assert isinstance(end, Failed) and "SIGKILL" in end.reason and "twice" in end.reason


def test_each_member_of_a_group_may_have_a_prompt_of_its_own(tokenizer: Any) -> None:
    asked = iter(range(100))
    worker = Worker(tokenizer, lambda row, ask: ask(user(f"begin {next(asked)}")).content)
    group = worker.begin()
    other = replace(group, trajectory_id=5, begins=True)
    own = worker.episodes.answer(other, worker.row)
    assert isinstance(own, Observed) and own.begins and own.after == 0
    whole = [*group.prompt[: own.kept], *own.tokens]
    assert tokenizer.decode(whole) == "begin 1\n" and own.kept >= len("begin ")
    start, forks = len(own.tokens), [Fork(0, 0, own.kept)]
    request = replace(
        other, begins=False, tokens=own.tokens, logprobs=array("f", [math.nan] * start), forks=forks
    )
    end = worker.episodes.answer(worker.say(request, "yes"), worker.row)
    assert isinstance(end, Scored) and end.value == 2.0
    worker.episodes = worker.restarted()
    again = worker.episodes.answer(worker.say(request, "yes"), worker.row)
    assert isinstance(again, Observed) and again.begins, "a later agent asks something else"
    assert len(worker.running) == 3 and len(worker.episodes.open) == 1


def test_a_first_request_that_fills_a_sequence_fails_its_trajectory(tokenizer: Any) -> None:
    texts = iter(["a", "b" * 600])
    worker = Worker(tokenizer, lambda row, ask: ask(user(next(texts))).content)
    other = replace(worker.begin(), trajectory_id=5, begins=True)
    failed = worker.episodes.answer(other, worker.row)
    assert isinstance(failed, Failed) and "rollout.max_sequence_tokens" in failed.reason
    assert len(worker.episodes.open) == 1


def test_only_the_new_turn_crosses_to_the_worker_that_has_the_episode(tokenizer: Any) -> None:
    worker = Worker(tokenizer, two_turns)
    request = worker.say(worker.begin(), "no")
    short = replace(request, prompt=token_array(), known=0)
    found = worker.episodes.open.whole(short)
    assert found == (request, worker.row)
    answer = worker.episodes.answer(*found)
    request = worker.say(worker.observe(request, answer), "yes")
    start, stop, _ = request.turns[-1]
    parts = {"tokens": request.tokens[start:stop], "logprobs": request.logprobs[start:stop]}
    short = replace(short, turns=request.turns[-1:], known=start, **parts)
    assert worker.episodes.open.whole(replace(short, known=start - 1)) is None
    assert worker.restarted().open.whole(short) is None
    end = worker.episodes.answer(*worker.episodes.open.whole(short))
    assert isinstance(end, Scored) and end.value == 3.0


def test_a_rewritten_history_is_a_sequence_of_its_own(tokenizer: Any) -> None:
    def summarises(row: Row, ask: Ask) -> str:
        ask(user(row["prompt"]))
        return ask(user("in short")).content

    worker = Worker(tokenizer, summarises)
    request = worker.say(worker.begin(), "no")
    answer = worker.episodes.answer(request, worker.row)
    assert isinstance(answer, Observed) and answer.after == 0
    whole = [*request.prompt[: answer.kept], *answer.tokens]
    assert tokenizer.decode(whole) == "in short\n" and answer.metrics["forks_other"] == 0.0


def test_a_budget_ends_the_agent_with_a_plain_text(tokenizer: Any) -> None:
    heard: list[str] = []

    def endless(row: Row, ask: Ask) -> str:
        messages = [user(row["prompt"])]
        while (reply := ask(*messages)).ids:
            messages += [reply.turn, user("more")]
        heard.append(reply.content)
        return "yes"

    worker = Worker(tokenizer, endless)
    worker.episodes = worker.restarted(turns=2)
    request = worker.say(worker.begin(), "a")
    request = worker.say(worker.observe(request, worker.episodes.answer(request, worker.row)), "b")
    end = worker.episodes.answer(request, worker.row)
    assert isinstance(end, Scored) and end.truncated and end.metrics["ended_by_turns"] == 1.0
    assert end.value == 3.0 and heard and "ended" in heard[0]


def test_a_turn_without_an_end_ends_the_episode(tokenizer: Any) -> None:
    worker = Worker(tokenizer, two_turns)
    end = worker.episodes.answer(worker.say(worker.begin(), "abc", Finish.LENGTH), worker.row)
    assert isinstance(end, Scored) and end.truncated and end.metrics["ended_by_tokens"] == 1.0


def refused(ask: Any) -> None:
    """Most requests are refused before they are calls."""
    ask.__self__.session.count_refusal(RefusedCall("`n` asks for two"))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda row, ask: "nothing", "ended without a call"),
        (lambda row, ask: 1 / 0, "exit code 1"),
        (lambda row, ask: refused(ask) or 1 / 0, "by zero\n  its last refused request: `n` asks for two"),
        (lambda row, ask: threading.Event().wait(9), "no call for 1 s"),
        (lambda row, ask: refused(ask) or threading.Event().wait(9), "refused request: `n` asks for two"),
    ],
)
def test_an_agent_that_never_asks_has_no_prompt(tokenizer: Any, program: Program, reason: str) -> None:
    worker = Worker(tokenizer, program, timeout_s=1.0)
    failed = worker.episodes.first(worker.row)
    assert isinstance(failed, Failed) and reason in failed.reason


def test_an_agent_beyond_the_time_of_its_task_ends_and_what_it_left_is_scored(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(row: Row, ask: Ask) -> str:
        ask(user(row["prompt"]))
        threading.Event().wait()
        return "yes"

    def time_s(agent: ThreadAgent) -> float:
        return math.inf if agent.pending is None or agent.pending.outcome is None else 0.0

    monkeypatch.setattr(ThreadAgent, "pending", None, raising=False)
    monkeypatch.setattr(ThreadAgent, "time_s", property(time_s))
    worker = Worker(tokenizer, hangs)
    end = worker.episodes.answer(worker.say(worker.begin(), "no"), worker.row)
    assert isinstance(end, Scored), end
    assert (end.value, end.metrics["agent_timed_out"], end.metrics["said"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("act", "reason"),
    [(lambda: 1 / 0, "exit code 1"), (lambda: threading.Event().wait(9), "no call for 1 s")],
)
def test_an_agent_that_dies_or_hangs_fails_its_episode(tokenizer: Any, act: Any, reason: str) -> None:
    def program(row: Row, ask: Ask) -> None:
        ask(user(row["prompt"]))
        act()

    worker = Worker(tokenizer, program, timeout_s=1.0)
    end = worker.episodes.answer(worker.say(worker.begin(), "yes"), worker.row)
    assert isinstance(end, Failed) and reason in end.reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Call(messages=[user("x")], stop=["a", "b" * 300]), "16 stop strings of 256 characters"),
        (Call(messages=[user("x")], stop=["a"] * 17), "16 stop strings of 256 characters"),
        (Call(prompt=[1, 10**6]), "token ids are from 0"),
        (Call(prompt=[1], stop_ids=[10**6]), "token ids are from 0"),
        (Call(prompt=[1], stop_ids=[1] * 17), "16 ids that end a turn"),
        (Call(messages=[ChatTurn(role="assistant", content="x")]), "the assistant's"),
    ],
)
def test_a_call_that_the_run_cannot_answer_is_refused_and_no_turn(
    tokenizer: Any, call: Call, reason: str
) -> None:
    said: list[str] = []

    def program(row: Row, ask: Ask) -> str:
        with pytest.raises(RefusedCall) as refused:
            ask(*call.messages, prompt=call.prompt, stop=call.stop, stop_ids=call.stop_ids)
        said.append(str(refused.value))
        return ask(user(row["prompt"])).content

    worker = Worker(tokenizer, program)
    end = worker.episodes.answer(worker.say(worker.begin(), "yes"), worker.row)
    assert isinstance(end, Scored) and end.metrics["calls_refused"] == 1.0
    assert all(reason in one for one in said)


END_ID = 1
"""Ends each turn of the run."""


def bounded(row: Row, ask: Ask) -> str:
    """Three turns. The second asks for as many tokens as the run gives, and for more tokens that end it."""
    messages = [user(row["prompt"])]
    bounds = [{"max_tokens": 3}, {"max_tokens": 100, "stop_ids": [9, 4, END_ID]}, {"stop": ["|", "END"]}]
    for number, fields in enumerate(bounds):
        reply = ask(*messages, **fields)
        messages += [reply.turn, user(f"{number} {reply.finish} {reply.stop}")]
    return reply.content


def test_the_bounds_of_a_request_go_with_its_prompt(tokenizer: Any) -> None:
    worker = Worker(tokenizer, bounded)
    first = worker.episodes.first(worker.row)
    assert isinstance(first, Ids) and first.bounds == TurnBounds(3)
    request, seen = worker.say(worker.begin(), "abc"), []
    for said in ("d", "yesEND"):
        for episodes in (worker.episodes, worker.restarted()):  # a repeated agent hears and asks the same
            answer = episodes.answer(request, worker.row)
            assert isinstance(answer, Observed)
            seen += [(tokenizer.decode(list(answer.tokens)), answer.bounds)]
        request = worker.say(worker.observe(request, answer), said)
    second, third = TurnBounds(100, (), (4, 9)), TurnBounds(0, ("END",))
    assert seen == [("0 length \n", second)] * 2 + [("1 stop \n", third)] * 2
    end = worker.restarted().answer(request, worker.row)
    assert isinstance(end, Scored) and end.metrics["right"] == 1.0  # without the stop string


@pytest.mark.parametrize(
    ("said", "finish"), [("abc", "length"), ("ab|", "stop"), ("aXY", "stop"), ("ab", "stop")]
)
def test_what_ended_a_turn_as_long_as_asked_is_told(tokenizer: Any, said: str, finish: str) -> None:
    heard: list[Reply] = []

    def program(row: Row, ask: Ask) -> str:
        heard.append(ask(user(row["prompt"]), max_tokens=3, stop=["XY"]))
        return heard[-1].content

    worker = Worker(tokenizer, program)
    assert isinstance(worker.episodes.answer(worker.say(worker.begin(), said), worker.row), Scored)
    assert heard[-1].finish == finish and heard[-1].ids == worker.ids(said)
    assert (heard[-1].content, heard[-1].stop) == (("a", "XY") if "XY" in said else (said, ""))


def test_what_an_agent_asks_after_half_a_turn_is_not_counted(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tokenizer, two_turns)
    request = worker.begin()
    answer = PendingCall.answer

    def refused_at_once(pending: PendingCall, reply: Reply) -> None:
        answer(pending, reply)
        worker.running[-1].session.count_refusal(RefusedCall("no"))

    monkeypatch.setattr(PendingCall, "answer", refused_at_once)
    end = worker.episodes.answer(worker.say(request, "half", Finish.LENGTH), worker.row)
    assert isinstance(end, Scored) and end.truncated and end.metrics["calls_refused"] == 0.0


def test_an_agent_that_fails_later_tells_its_refused_request(tokenizer: Any) -> None:
    def program(row: Row, ask: Ask) -> None:
        ask(user(row["prompt"]))
        ask(user("and?"), stop=["a"] * 17)

    worker = Worker(tokenizer, program)
    failed = worker.episodes.answer(worker.say(worker.begin(), "abc"), worker.row)
    assert isinstance(failed, Failed) and "its last refused request: there may be 16 stop" in failed.reason


def test_log_probs_are_those_of_the_record(tokenizer: Any) -> None:
    heard: list[Reply] = []

    def program(row: Row, ask: Ask) -> str:
        heard.append(ask(user(row["prompt"]), logprobs=True))
        return heard[-1].content

    worker = Worker(tokenizer, program)
    worker.episodes.answer(worker.say(worker.begin(), "yes"), worker.row)
    assert (heard[-1].logprobs, heard[-1].pieces) == ([-1.0] * 3, ["y", "e", "s"])
