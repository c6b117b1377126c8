"""What a turn is as a reply, in each dialect."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.gateway_replies import CALLS, TOOL

from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call, ChatTurn
from millrace.episodes.gateway.local_agents import DIALECTS, MESSAGES
from millrace.episodes.gateway.replies import Replies

STOP = "§"


@pytest.mark.parametrize("path", DIALECTS)
def test_a_turn_that_was_given_has_a_logprob_for_each_token(path: str, tmp_path: Path) -> None:
    make_character_tokenizer(tmp_path, string.printable)
    call = Call(prompt=[3, 4], logprobs=True, top_logprobs=1)
    turn = SampledTurn(ids=[20, 21, 1], logprobs=[], finish="stop")
    reply = Replies(load_tokenizer(tmp_path)).make("r1", call, [3, 4], turn)
    assert reply.logprobs == [0.0, 0.0, 0.0]
    assert DIALECTS[path].reply(call, reply)


def test_anthropic_is_told_which_stop_sequence_ended_a_reply(tmp_path: Path) -> None:
    make_character_tokenizer(tmp_path, string.printable)
    tokenizer = load_tokenizer(tmp_path)
    call = Call(messages=[ChatTurn(role="user", content="x")], stop=["END", "NO"])
    turn = SampledTurn(ids=tokenizer.encode("said END", add_special_tokens=False), logprobs=[], finish="stop")
    reply = Replies(tokenizer).make("r1", call, [3], turn)
    message = MESSAGES.reply(call, reply)
    assert message["content"] == [{"type": "text", "text": "said "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    events = b"".join(MESSAGES.events(call, reply))
    assert events.count(b'"stop_sequence":"END"') == 1 and b'"stop_reason":"stop_sequence"' in events
    assert reply.ids == turn.ids, "the record keeps what was sampled"


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ankara", "days": 2}}</tool_call>'


@pytest.mark.parametrize("text", [CALL, f"Look. {CALL}{CALL}", 'weather(city="Ankara", days=2)'])
@pytest.mark.parametrize("cut", ["by the run", "by the request", "by a stop string"])
def test_a_call_that_is_cut_is_text_and_a_call_is_whole(text: str, cut: str, tmp_path: Path) -> None:
    make_character_tokenizer(tmp_path, string.printable + STOP)
    tokenizer = load_tokenizer(tmp_path)
    for length in range(1, len(text) + 1):
        call = Call(messages=[ChatTurn(role="user", content="?")], tools=[TOOL])
        written = text[:length]
        if cut == "by the request":
            call.max_tokens = length
        elif cut == "by a stop string":
            call.stop, written = [STOP], written + STOP
        ids = tokenizer.encode(written, add_special_tokens=False)
        turn = SampledTurn(ids=ids, logprobs=[], finish="length" if cut == "by the run" else "stop")
        reply = Replies(tokenizer).make("r1", call, [3], turn)
        whole = [one.arguments for one in reply.calls]
        assert set(whole) <= {'{"city": "Ankara", "days": 2}'}
        assert whole or reply.content == text[:length]
        if cut != "by a stop string":
            assert reply.finish == "length"
        for path in "/v1/chat/completions", "/v1/responses", "/v1/messages":
            events = b"".join(DIALECTS[path].events(call, reply))
            marks = b'"tool_calls":[', b'"function_call"', b'"tool_use"'
            assert any(mark in events for mark in marks) == bool(whole)
    assert len(whole) == text.count("city")


def test_a_whole_call_in_a_reply_that_was_cut_behind_it_is_no_incomplete_call() -> None:
    reply = replace(CALLS, finish="length")
    answer = DIALECTS["/v1/responses"].reply(Call(), reply)
    assert answer["status"] == "incomplete"
    assert [one["status"] for one in answer["output"] if one["type"] == "function_call"] == ["completed"] * 2
