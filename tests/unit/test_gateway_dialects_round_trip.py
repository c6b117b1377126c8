"""A reply comes back in the agent's next request as an equal turn, in each dialect of chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import few
from tests.unit import gateway_streams

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, Reply
from millrace.episodes.gateway.dialects.shapes import DELTA_CHARACTERS
from millrace.episodes.gateway.local_agents import DIALECTS

NEXT = "And then?"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LONG = st.sampled_from(["", "ä" * (2 * DELTA_CHARACTERS + 1)])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, separators, ascii: json.dumps(value, separators=separators, ensure_ascii=ascii),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.booleans(),
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,8}", fullmatch=True)
CALLS = st.lists(st.builds(CallOfTool, NAMES, NAMES, ARGUMENTS), max_size=3).map(tuple)
TOKENS = st.lists(st.tuples(st.integers(0, 99), TEXTS, st.floats(-50, 0)), max_size=4)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    calls, tokens = draw(CALLS), draw(TOKENS)
    content = draw(TEXTS) + draw(LONG)
    return Reply(
        id=draw(NAMES),
        created=1,
        model="policy",
        text=content,
        content=content,
        reasoning=draw(TEXTS) + draw(LONG),
        calls=calls,
        finish="tool_calls" if calls else draw(st.sampled_from(["stop", "length"])),
        prompt_ids=[1, 2],
        ids=[token_id for token_id, _, _ in tokens],
        pieces=[piece for _, piece, _ in tokens],
        logprobs=[logprob for _, _, logprob in tokens],
    )


def next_chat(message: dict[str, Any]) -> dict[str, Any]:
    user = {"role": "user", "content": NEXT}
    return {"messages": [{"role": "user", "content": "Go."}, message, user]}


def next_responses(response: dict[str, Any]) -> dict[str, Any]:
    items = [{"role": "user", "content": "Go."}, *response["output"], {"role": "user", "content": NEXT}]
    return {"input": items}


def next_messages(message: dict[str, Any]) -> dict[str, Any]:
    return next_chat({"role": "assistant", "content": message["content"]})


def come_back(path: str, reply: Reply, *, stream: bool) -> list[ChatTurn]:
    """The turns of the request after `reply`."""
    dialect, call = DIALECTS[path], Call(logprobs=True, stream=stream)
    if path == "/v1/chat/completions":
        whole = gateway_streams.of_chat(dialect.events(call, reply))
        message = whole["message"] if stream else dialect.reply(call, reply)["choices"][0]["message"]
        body = next_chat(message)
    elif path == "/v1/responses":
        response = dialect.reply(call, reply)
        assert gateway_streams.of_responses(dialect.events(call, reply)) == response
        body = next_responses(response)
    else:
        message = dialect.reply(call, reply)
        assert gateway_streams.of_messages(dialect.events(call, reply)) == message
        body = next_messages(message)
    return dialect.read(json.dumps(body).encode()).messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("examples", few([20, 80]))
def test_a_reply_comes_back_as_an_equal_turn(path: str, stream: bool, examples: int) -> None:
    @settings(max_examples=examples, database=None, derandomize=True)
    @given(replies())
    def holds(reply: Reply) -> None:
        user, turn, then = come_back(path, reply, stream=stream)
        assert turn == reply.turn
        assert (user.content, then.content) == ("Go.", NEXT)

    holds()


@pytest.mark.parametrize(
    "written",
    ['{"a": 1.0}', '{"a":1}', '{ "a" : 1 }', '{"\\u0061":1}', '{"a":1e0}'],
)
def test_one_value_of_arguments_is_one_text(written: str) -> None:
    reply = Reply(
        id="r",
        created=1,
        model="m",
        text="",
        content="",
        calls=(CallOfTool("c", "f", written),),
        finish="tool_calls",
    )
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        turn = come_back(path, reply, stream=False)[1]
        assert turn.calls == (CallOfTool("c", "f", '{"a": 1}'),)
        assert turn == reply.turn


@pytest.mark.parametrize("written", ['{"a": "\\ud800"}', '{"\\udfff": 2}'])
def test_half_a_pair_of_surrogates_breaks_no_dialect(written: str) -> None:
    reply = Reply(
        id="r",
        created=1,
        model="m",
        text="",
        content="",
        calls=(CallOfTool("c", "f", written),),
        finish="tool_calls",
    )
    assert come_back("/v1/messages", reply, stream=False)[1] == reply.turn
    assert "\ufffd" in reply.turn.calls[0].arguments


def test_a_reply_of_responses_comes_back_without_its_encrypted_reasoning() -> None:
    """And with the encrypted reasoning alone."""
    reply = Reply(id="r", created=1, model="m", text="", content="Yes.", reasoning="Hm.")
    dialect = DIALECTS["/v1/responses"]
    response = dialect.reply(Call(), reply)
    for name in ("encrypted_content", "content"):
        without = {**response, "output": [dict(item) for item in response["output"]]}
        del without["output"][0][name]
        turns = dialect.read(json.dumps(next_responses(without)).encode()).messages
        assert turns[1] == reply.turn
