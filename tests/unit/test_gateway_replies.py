"""What a turn is as a reply, in each dialect."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from millrace.environments.gateway.calls import Call, ChatTurn
from millrace.environments.gateway.dialects.paths import DIALECTS, MESSAGES
from millrace.environments.gateway.replies import Replies
from millrace.environments.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.environments.turns.environment import SampledTurn


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
