"""Each call of an agent belongs behind the turn that it goes on from, and sampled ids stay as they are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.chat_templates import STYLES, make_tokenizer

from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, RefusedCall
from millrace.episodes.gateway.conversation import (
    HISTORY,
    OTHER,
    TEMPLATE,
    TOOLS,
    CallPlace,
    Conversation,
)
from millrace.episodes.gateway.rendering import PlainRendering, make_rendering
from millrace.episodes.gateway.replies import Replies

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {}}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "listen", "parameters": {}}}
BEGIN = ChatTurn(role="user", content="begin")
QWEN = "hermes"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Talk:
    """An agent's calls with a model that says what it is told to say."""

    def __init__(self, tokenizer: Any, end: str = "") -> None:
        self.tokenizer, self.end = tokenizer, end
        rendering = make_rendering(tokenizer, {})
        self.conversation = Conversation(rendering)
        self.replies = Replies(tokenizer, rendering.style)
        self.number = 0

    def place(self, *messages: ChatTurn, tools: list[Any] | None = None) -> tuple[Call, CallPlace]:
        call = Call(messages=list(messages), tools=tools or [])
        return call, self.conversation.place(call)

    def say(self, call: Call, place: CallPlace, text: str) -> ChatTurn:
        ids = self.tokenizer.encode(text + self.end, add_special_tokens=False)
        reply = self.replies.make(f"turn{self.number}", call, place.context, SampledTurn(ids, [], "turn"))
        self.conversation.add(call, place, reply)
        self.number += 1
        return reply.turn

    def turn(
        self, *messages: ChatTurn, text: str, tools: list[Any] | None = None
    ) -> tuple[CallPlace, ChatTurn]:
        call, place = self.place(*messages, tools=tools)
        return place, self.say(call, place, text)


def user(text: str) -> ChatTurn:
    return ChatTurn(role="user", content=text)


@pytest.mark.parametrize("name", STYLES)
def test_ordinary_turns_are_one_sequence_under_every_template(tokenizer: Any, name: str) -> None:
    style = STYLES[name]
    tokenizer.chat_template = style.template
    rng = random.Random(name)
    talk = Talk(tokenizer, style.end)
    messages, before = [BEGIN], list[int]()
    for number in range(4):
        place, said = talk.turn(*messages, text=rng.choice(["yes", "True", " no\n", "é <b>"]))
        assert place.context[: len(before)] == before, "what the model saw and sampled stays"
        assert place.after == (0 if number == 0 else None)
        before = [*place.context, *talk.conversation._turns[-1].ids]
        messages += [said, ChatTurn(role=style.roles[0], content=rng.choice(["false", "2", "<|x|>"]))]
    assert not sum(talk.conversation.forks.values())


@pytest.fixture
def talk(tokenizer: Any) -> Talk:
    style = next(one for one in STYLES.values() if "tools" in one.template and "tool" in one.roles)
    tokenizer.chat_template = style.template
    return Talk(tokenizer, style.end)


def test_results_of_tools_follow_the_calls(talk: Talk) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": false}}</tool_call>'
    _, said = talk.turn(BEGIN, text=f"I look. {call}", tools=[LOOK])
    assert said.content == "I look."
    assert said.calls == (CallOfTool("call_turn0_0", "look", '{"at": false}'),)
    result = ChatTurn(role="tool", content="false", call_id="call_turn0_0")
    place, _ = talk.turn(BEGIN, said, result, text="done", tools=[LOOK])
    assert place.after is None
    again = replace(said, calls=(replace(said.calls[0], arguments='{ "at":false }'),))
    place, _ = talk.turn(BEGIN, again, result, user("more"), text="done", tools=[LOOK])
    assert place.after == 1, "other spaces in the arguments are no other history"


@pytest.mark.parametrize(
    "text", ["<tool_call>{</tool_call>", '<tool_call>{"name": 3}</tool_call>', "look(1)"]
)
def test_a_malformed_call_is_text(talk: Talk, text: str) -> None:
    _, said = talk.turn(BEGIN, text=text, tools=[LOOK])
    assert said.content == text and not said.calls


def test_a_rewritten_history_begins_a_sequence(talk: Talk) -> None:
    _, said = talk.turn(BEGIN, text="first")
    call, place = talk.place(BEGIN, replace(said, content="something else"), user("go on"))
    assert (place.after, place.cause, place.ids) == (0, HISTORY, place.context)
    talk.say(call, place, "x")
    assert talk.conversation.forks[HISTORY] == 1


def test_other_tools_and_other_begins_have_their_causes(talk: Talk) -> None:
    _, said = talk.turn(BEGIN, text="first", tools=[LOOK])
    assert talk.place(BEGIN, said, user("more"), tools=[OTHER_TOOL])[1].cause == TOOLS
    assert talk.place(ChatTurn(role="system", content="you are"), BEGIN)[1].cause == OTHER


def test_a_template_that_rewrites_earlier_messages_begins_a_sequence(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.length }}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    )
    talk = Talk(tokenizer)
    _, said = talk.turn(BEGIN, text="first")
    assert talk.place(BEGIN, said, user("more"))[1].cause == TEMPLATE


def test_two_calls_from_one_begin_are_two_branches(talk: Talk) -> None:
    _, first = talk.turn(BEGIN, text="first")
    place, left = talk.turn(BEGIN, first, user("left"), text="l")
    assert place.after is None
    place, right = talk.turn(BEGIN, first, user("right"), text="r")
    assert place.after == 1
    place, _ = talk.turn(BEGIN, first, user("left"), left, user("more"), text="end")
    assert place.after == 2
    place, _ = talk.turn(BEGIN, first, user("right"), right, user("more"), text="end")
    assert place.after == 3


def test_a_summary_that_a_later_request_has_is_used_and_one_that_was_thrown_away_is_not(talk: Talk) -> None:
    _, said = talk.turn(BEGIN, text="I look around")
    history = [BEGIN, said]
    talk.turn(*history, user("in short"), text="<think>well</think>nothing yet")
    assert talk.conversation.replies_unused == 0, "it is the newest"
    talk.turn(*history, user("in short, again"), text="\n a room\n")
    assert talk.conversation.replies_unused == 1
    talk.turn(BEGIN, user("Until now: a room. Go on"), text="I go")
    assert talk.conversation.replies_unused == 1
    talk.turn(BEGIN, user("nothing yet"), text="at last")
    assert talk.conversation.replies_unused == 1, "`I go` in place of the first summary"


def test_prompts_of_ids_do_not_tell_which_replies_are_used(talk: Talk) -> None:
    for prompt in ([5, 6], [7, 8], [9, 5]):
        call = Call(prompt=prompt)
        talk.say(call, talk.conversation.place(call), "yes")
    assert talk.conversation.replies_unused == 0


def test_an_agent_may_leave_out_reasoning(talk: Talk) -> None:
    _, said = talk.turn(BEGIN, text="<think>hm</think>yes")
    assert (said.reasoning, said.content) == ("hm", "yes")
    assert talk.place(BEGIN, said, user("more"))[1].after is None
    assert talk.place(BEGIN, replace(said, reasoning=""), user("more"))[1].after is None
    assert talk.place(BEGIN, replace(said, reasoning="other"), user("more"))[1].after == 0


def test_ids_as_a_prompt_go_on_where_they_begin_like_a_turn(talk: Talk) -> None:
    first = Call(prompt=[5, 6, 7])
    place = talk.conversation.place(first)
    assert (place.context, place.after) == ([5, 6, 7], 0)
    reply = talk.replies.make("turn0", first, place.context, SampledTurn([8, 9], [], "turn"))
    talk.conversation.add(first, place, reply)
    assert talk.conversation.place(Call(prompt=[5, 6, 7, 8, 9, 10])) == CallPlace(
        [5, 6, 7, 8, 9, 10], [10], None
    )
    assert talk.conversation.place(Call(prompt=[5, 6, 7, 8, 9])).after == 0, "nothing new to observe"
    assert talk.conversation.place(Call(prompt=[5, 6, 7, 8, 1])).after == 0


def test_special_tokens_in_any_message_are_text(tokenizer: Any) -> None:
    for name, style in STYLES.items():
        tokenizer.chat_template = style.template
        rendering = make_rendering(tokenizer, {})
        plain, hostile = (rendering.whole([user(text)], []) for text in ("x", style.end * 3))
        end = tokenizer.convert_tokens_to_ids(style.end)
        assert plain.count(end) == hostile.count(end), name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call(), "no messages"),
        (Call(messages=[BEGIN, ChatTurn(role="assistant", content="begun")]), "the assistant's"),
        (Call(prompt=[]), "no token"),
    ],
)
def test_a_call_without_a_prompt_is_refused(talk: Talk, call: Call, said: str) -> None:
    with pytest.raises(RefusedCall, match=said):
        talk.conversation.place(call)


def test_without_a_template_messages_are_lines(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    talk = Talk(tokenizer)
    assert isinstance(make_rendering(tokenizer, {}), PlainRendering)
    place, said = talk.turn(BEGIN, text="look(3)", tools=[LOOK])
    assert tokenizer.decode(place.context).endswith("begin\n")
    assert [json.loads(one.arguments) for one in said.calls] == [{"at": 3}]
    place, _ = talk.turn(BEGIN, said, ChatTurn(role="tool", content="9"), text="9", tools=[LOOK])
    assert (place.after, tokenizer.decode(place.ids)) == (None, "9\n")
