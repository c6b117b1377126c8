"""Requests of real SDKs, and of other agents, as calls; what is refused; the forms of replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway_replies import CALLS, CUT, TEXT, TOOL
from tests.unit import gateway_streams
from tests.unit.gateway_requests import recorded

from millrace.episodes.gateway.calls import Call, CallOfTool, ChatTurn, RefusedCall, Reply
from millrace.episodes.gateway.local_agents import COUNT_TOKENS, DIALECTS, MESSAGES

CHAT, TEXTS, RESPONSES, OF_ANTHROPIC, GENERATE = DIALECTS
ASK = [{"role": "user", "content": "How is it?"}]
USER = ChatTurn(role="user", content="How is it?")
BRIEF = ChatTurn(role="system", content="Be brief.")
RESULTS = [
    ChatTurn(role="tool", content="rain", call_id="call_1"),
    ChatTurn(role="tool", content="sun", call_id="call_2"),
]
ANSWERED = [USER, CALLS.turn, *RESULTS]
WITH_TOOL: dict[str, Any] = {"tools": [TOOL]}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
IN_CHAT = dict(messages=[USER], max_tokens=50, logprobs=True, token_ids=True, **WITH_TOOL)
IN_MESSAGES = dict(messages=[BRIEF, USER], max_tokens=50, stop=["END"], unheeded=THINKING, **WITH_TOOL)
INCLUDE = {"include": ["reasoning.encrypted_content"], "store": False}
IN_RESPONSES = dict(messages=[BRIEF, USER], logprobs=True, **WITH_TOOL)
EXPECTED = {
    "openai_chat": IN_CHAT | {"unheeded": {"temperature": 0.5}},
    "openai_chat_stream": IN_CHAT | {"stream": True, "usage": True},
    "openai_chat_results": {"messages": ANSWERED},
    "openai_completion": {
        "prompt": [5, 6, 7],
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 9,
        "stop": ["\n"],
        "token_ids": True,
    },
    "openai_responses": IN_RESPONSES | {"unheeded": {**INCLUDE, "temperature": 0.5}},
    "openai_responses_stream": IN_RESPONSES | {"stream": True, "unheeded": INCLUDE},
    "openai_responses_results": {"messages": ANSWERED},
    "anthropic_messages": IN_MESSAGES,
    "anthropic_messages_stream": IN_MESSAGES | {"stream": True},
    "anthropic_messages_results": {
        "messages": [*ANSWERED, ChatTurn(role="user", content="And?")],
        "max_tokens": 50,
    },
    "anthropic_count_tokens": {"messages": [USER], **WITH_TOOL},
}
"""The fields of each call, beside the model."""


def read(path: str, **body: Any) -> Call:
    return DIALECTS[path].read(json.dumps(body).encode())


def refusal(path: str, **body: Any) -> RefusedCall:
    with pytest.raises(RefusedCall) as refused:
        read(path, **body)
    return refused.value


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_an_sdk_sent_is_read_as_the_call_that_it_means(name: str) -> None:
    request = recorded()[name]
    body = json.dumps(request["body"]).encode()
    read = MESSAGES.read_count if request["path"] == COUNT_TOKENS else DIALECTS[request["path"]].read
    assert read(body) == Call(model="policy", **EXPECTED[name])


@pytest.mark.parametrize("name", ["agents_chat", "agents_responses"])
def test_what_the_agents_sdk_sent_is_read_as_a_conversation_with_a_tool(name: str) -> None:
    request = recorded()[name]
    call = DIALECTS[request["path"]].read(json.dumps(request["body"]).encode())
    system, user, turn, *results = call.messages
    assert (system, user, turn.content, turn.calls) == (BRIEF, USER, CALLS.content, CALLS.turn.calls)
    assert turn.reasoning == (CALLS.reasoning if name == "agents_responses" else "")
    assert [one.call_id for one in results] == ["call_1", "call_2"]
    assert call.tools[0]["function"]["name"] == "weather" and "strict" not in call.tools[0]["function"]
    assert call.unheeded == {"temperature": 1.0, "strict": ["weather"]}


OF_TOOLS = ["user", "assistant", "tool"]
PACKAGES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "inspect_chat": (["system", *OF_TOOLS], ["multiply", "submit"], {"strict": ["multiply", "submit"]}),
    "langgraph_chat": (OF_TOOLS, ["multiply"], {}),
    "mini_swe_agent_chat": (["system", *OF_TOOLS], ["bash"], {}),
    "pydantic_ai_chat": (OF_TOOLS, ["multiply"], {"strict": ["multiply"]}),
    "smolagents_chat": (
        ["system", "user", "assistant", "user"],
        ["multiply", "final_answer"],
        {"tool_choice": "required"},
    ),
}
"""Of requests of agents: the roles, the tools and what changes nothing."""


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_what_an_agent_of_a_package_sent_is_read_as_a_conversation_with_tools(name: str) -> None:
    request, (roles, tools, unheeded) = recorded()[name], PACKAGES[name]
    call = DIALECTS[request["path"]].read(json.dumps(request["body"]).encode())
    assert [turn.role for turn in call.messages] == roles and not call.stream
    assert [tool["function"]["name"] for tool in call.tools] == tools
    assert call.unheeded == unheeded and call.max_tokens is None
    asked, answered = call.messages[-2:]
    assert "408" in answered.content
    if name == "smolagents_chat":  # its calls are text, and Python, in the next request
        assert call.stop == ["Observation:", "Calling tools:"] and not asked.calls
        assert "Calling tools:\n[{'id': 'call_r1_0'," in asked.content
    else:
        assert [one.id for one in asked.calls] == [answered.call_id] == ["call_r1_0"]


def test_every_recorded_request_is_tested() -> None:
    assert recorded().keys() == {*EXPECTED, *PACKAGES, "agents_chat", "agents_responses"}


FORCED: dict[str, Any] = {"messages": ASK, "tools": [TOOL]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        (CHAT, {"messages": ASK, "n": 2}, "n", "more than one turn"),
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]", "text alone"),
        (CHAT, {"messages": []}, "messages", "no message"),
        (CHAT, {"messages": "x"}, "messages", "list of objects"),
        (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role", "one of system"),
        (CHAT, {"messages": ASK, "max_tokens": "many"}, "max_tokens", "is 'many': it must be a whole"),
        (CHAT, {"messages": ASK, "max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"messages": ASK, "stop": [""]}, "stop", "without an empty one"),
        (CHAT, {"messages": ASK, "stream": "yes"}, "stream", "true or false"),
        (CHAT, {"messages": ASK, "top_logprobs": 5}, "top_logprobs", "sampled tokens are kept"),
        (CHAT, {"messages": ASK, "logit_bias": {"5": 1}}, "logit_bias", "policy that is trained"),
        (CHAT, {"messages": ASK, "guided_regex": "a+"}, "guided_regex", "policy that is trained"),
        (
            CHAT,
            {"messages": ASK, "response_format": {"type": "json_object"}},
            "response_format",
            "constrains",
        ),
        (CHAT, {"messages": ASK, "modalities": ["text", "audio"]}, "modalities", "text alone"),
        (CHAT, {"messages": ASK, "functions": [{"name": "f"}]}, "functions", "older form"),
        (CHAT, FORCED | {"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "forces"),
        (CHAT, {"messages": ASK, "tools": [{"type": "custom"}]}, "tools[0].type", "only 'function'"),
        (CHAT, {"messages": ASK, "tools": [{"function": {}}]}, "tools[0].function.name", "missing"),
        (TEXTS, {"prompt": ["a", "b"]}, "prompt", "several prompts"),
        (TEXTS, {"prompt": [1, -1]}, "prompt", "token ids"),
        (TEXTS, {}, "prompt", "must be a text"),
        (TEXTS, {"prompt": "a", "echo": True}, "echo", "not possible"),
        (TEXTS, {"prompt": "a", "logprobs": 5}, "logprobs", "sampled tokens are kept"),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id", "stored"),
        (RESPONSES, {"input": "x", "background": True}, "background", "stored"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "agent runs itself"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type", "Send the item"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type", "functions with outputs"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format", "constrains"),
        (
            OF_ANTHROPIC,
            {"messages": ASK, "tool_choice": {"type": "tool", "name": "w"}},
            "tool_choice",
            "forces",
        ),
        (
            OF_ANTHROPIC,
            {"messages": ASK, "tools": [{"type": "bash_1", "name": "b"}]},
            "tools[0].type",
            "runs",
        ),
        (OF_ANTHROPIC, {"messages": [{"role": "assistant", "content": "{"}]}, "messages", "begins anew"),
        (OF_ANTHROPIC, {"messages": ASK, "mcp_servers": [{}]}, "mcp_servers", "agent runs"),
        (
            OF_ANTHROPIC,
            {"messages": ASK, "output_config": {"format": {"type": "x"}}},
            "output_config.format",
            "",
        ),
        (GENERATE, {"token_ids": []}, "token_ids", "not empty"),
        (GENERATE, {"token_ids": [1], "features": {"mm_hashes": {}}}, "features", "text alone"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n", "more than one"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words_that_name_the_field(
    path: str, body: dict[str, Any], field: str, words: str
) -> None:
    refused = refusal(path, **body)
    assert (refused.status, refused.field) == (400, field)
    assert str(refused).startswith(f"`{field}` ") and words in str(refused)


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"functions": []},
        {"audio": None},
        {"best_of": 1},
    ],
)
def test_a_field_that_asks_for_nothing_is_not_refused(harmless: dict[str, Any]) -> None:
    assert read(CHAT, messages=ASK, **harmless) == Call(messages=[USER])


def test_a_field_that_is_not_known_is_kept_and_changes_nothing() -> None:
    fields = {"top_k": 5, "seed": 1, "parallel_tool_calls": False, "x_vendor": {"a": [1]}, "nothing": None}
    call = read(CHAT, messages=ASK, **fields)
    assert call == Call(messages=[USER], unheeded={k: v for k, v in fields.items() if v is not None})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, OF_ANTHROPIC])
def test_without_a_choice_of_tools_they_are_left_out(path: str) -> None:
    tool = TOOL if path == CHAT else {"name": "weather"}
    choice = {"type": "none"} if path == OF_ANTHROPIC else "none"
    asked = {"messages": ASK, "input": "How is it?", "tools": [tool]}
    assert read(path, **asked).tools[0]["function"]["name"] == "weather"
    assert read(path, **asked, tool_choice=choice).tools == []


@pytest.mark.parametrize(
    ("path", "choice"), [(CHAT, "required"), (RESPONSES, "required"), (OF_ANTHROPIC, {"type": "any"})]
)
def test_a_call_of_any_tool_is_wanted_and_not_forced(path: str, choice: Any) -> None:
    """As smolagents asks each time. Its loop asks again where there is no call."""
    tool = TOOL if path == CHAT else {"name": "weather"}
    call = read(path, messages=ASK, input="How is it?", tools=[tool], tool_choice=choice)
    assert call.tools[0]["function"]["name"] == "weather"
    assert call.unheeded["tool_choice"] == ("any" if path == OF_ANTHROPIC else "required")


def test_the_newer_limit_of_tokens_comes_before_the_older() -> None:
    assert read(CHAT, messages=ASK, max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(CHAT, messages=ASK, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_both_of_its_names(name: str) -> None:
    turn = {"role": "assistant", "content": None, name: "Hm."}
    assert read(CHAT, messages=[*ASK, turn]).messages[1] == ChatTurn(role="assistant", reasoning="Hm.")


def test_items_of_the_assistant_that_follow_each_other_are_one_turn() -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
        {"role": "assistant", "content": "One."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "More."}]},
        {"role": "developer", "content": "Stop."},
    ]
    calls = (CallOfTool("a", "f", "{}"), CallOfTool("b", "g", "{}"))
    assert read(RESPONSES, input=items).messages == [
        ChatTurn(role="assistant", reasoning="Hm.", content="Wait.", calls=calls),
        ChatTurn(role="tool", content="1", call_id="a"),
        ChatTurn(role="assistant", reasoning="So.", content="One."),
        ChatTurn(role="assistant", reasoning="More."),
        ChatTurn(role="developer", content="Stop."),
    ]


def test_texts_and_results_of_a_user_keep_their_order() -> None:
    def text(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}

    def result(content: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}

    content = [text("1"), text("2"), result("3"), result([text("4")]), text("5")]
    assert read(OF_ANTHROPIC, messages=[{"role": "user", "content": content}]).messages == [
        ChatTurn(role="user", content="12"),
        ChatTurn(role="tool", content="3", call_id="a"),
        ChatTurn(role="tool", content="4", call_id="a"),
        ChatTurn(role="user", content="5"),
    ]


def test_the_billing_header_of_claude_code_is_no_text_of_the_system_prompt() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b;"
    system = [{"type": "text", "text": one} for one in (billing, "Be brief.")]
    call = read(OF_ANTHROPIC, messages=ASK, system=system)
    assert call.messages == [BRIEF, USER]
    assert call.unheeded == {"x-anthropic-billing-header": [billing]}


def test_text_that_was_cut_within_a_character_is_read() -> None:
    """json.dumps and JSON.stringify write a half as an escape, which UTF-8 does not have."""
    cut = {"messages": [{"role": "user", "content": "\ud83d and \udc80"}], "seed": 1}
    for path in CHAT, OF_ANTHROPIC:
        assert [one.content for one in read(path, **cut).messages] == ["\ufffd and \ufffd"]
    for body in (b'{"messages": "\\ud83d', b'{"seed": NaN, "prompt": "\\ud83d"}', b'{"prompt": "\xff"}'):
        with pytest.raises(RefusedCall, match="the body is no JSON"):
            DIALECTS[CHAT].read(body)


def test_a_prompt_is_a_text_or_ids_or_a_list_of_one() -> None:
    prompts: list[Any] = ["x", ["x"], [1, 2], [[1, 2]]]
    assert [read(TEXTS, prompt=one).prompt for one in prompts] == ["x", "x", [1, 2], [1, 2]]


def test_ids_in_and_ids_out_have_the_form_of_vllm() -> None:
    """As the client of the package renderers reads it: each `token` names the id at its position."""
    sampling = {"max_tokens": 8, "stop": "x", "logprobs": 1, "temperature": 1.0, "stop_token_ids": [2]}
    call = read(GENERATE, model="policy", token_ids=[5, 6], sampling_params=sampling, cache_salt="3")
    kept = {"temperature": 1.0}
    assert call == Call(
        model="policy",
        prompt=[5, 6],
        max_tokens=8,
        stop=["x"],
        stop_ids=[2],
        logprobs=True,
        top_logprobs=1,
        unheeded={"cache_salt": "3", "sampling_params": kept},
    )
    entries = [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None}
        for token_id, logprob in zip(CALLS.ids, CALLS.logprobs, strict=True)
    ]
    content = [{**one, "top_logprobs": [one]} for one in entries]
    choice = {"index": 0, "token_ids": CALLS.ids, "logprobs": {"content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert DIALECTS[GENERATE].reply(call, CALLS) == {
        "request_id": "r2",
        "model": "policy",
        "created": CALLS.created,
        "choices": [choice],
        "usage": usage,
    }
    call.usage = True
    *chunks, counts, done = gateway_streams.parse(DIALECTS[GENERATE].events(call, CALLS))
    assert chunks == [{"request_id": "r2", "choices": [choice]}]
    assert counts == {"request_id": "r2", "choices": [], "usage": usage} and done == {}


def test_long_replies_stream_the_ids_and_logprobs_of_every_token_once() -> None:
    num = 1000
    ids, logprobs = list(range(num)), [-0.001 * n for n in range(num)]
    reply = Reply(
        id="r", created=1, model="m", text="x" * num, content="x" * num,
        prompt_ids=[1], ids=ids, pieces=["x"] * num, logprobs=logprobs,
    )  # fmt: skip
    call = Call(logprobs=True, token_ids=True, usage=True)
    chat = gateway_streams.of_chat(DIALECTS[CHAT].events(call, reply))
    assert chat["token_ids"] == ids and [one["logprob"] for one in chat["logprobs"]] == logprobs
    assert chat["finish_reason"] == "stop" and chat["usage"]["completion_tokens"] == num
    *chunks, _, _ = gateway_streams.parse(DIALECTS[TEXTS].events(call, reply))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [one for part in found for one in part["token_logprobs"]] == logprobs
    assert [one for part in found for one in part["text_offset"]] == ids
    *chunks, _, _ = gateway_streams.parse(DIALECTS[GENERATE].events(call, reply))
    assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == ids
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_a_logprob_that_json_cannot_write_is_the_least_number() -> None:
    reply = Reply(
        id="r", created=1, model="m", text="ab", content="ab", ids=[1, 2], pieces=["a", "\ufffd"],
        logprobs=[float("-inf"), float("nan")],
    )  # fmt: skip
    call = Call(logprobs=True)
    content = DIALECTS[CHAT].reply(call, reply)["choices"][0]["logprobs"]["content"]
    assert [(one["logprob"], one["bytes"]) for one in content] == [(-9999.0, [97]), (-9999.0, None)]


def test_a_reply_without_tokens_is_a_whole_reply_in_every_dialect() -> None:
    ended = Reply(id="r", created=1, model="m", text="Over.", content="Over.")
    call = Call(logprobs=True, top_logprobs=1, token_ids=True, usage=True)
    for path, dialect in DIALECTS.items():
        written = json.dumps(dialect.reply(call, ended)) + b"".join(dialect.events(call, ended)).decode()
        assert path == GENERATE or written.count("Over.") >= 2


@pytest.mark.parametrize(
    ("reply", "reasons"),
    [
        (TEXT, ("stop", "stop", "completed", "end_turn", "stop")),
        (CALLS, ("tool_calls", "stop", "completed", "tool_use", "stop")),
        (CUT, ("length", "length", "incomplete", "max_tokens", "length")),
    ],
)
def test_each_dialect_has_its_word_for_the_end_of_a_turn(reply: Reply, reasons: tuple[str, ...]) -> None:
    written = [dialect.reply(Call(), reply) for dialect in DIALECTS.values()]
    found = [
        one["choices"][0]["finish_reason"] if "choices" in one else one.get("stop_reason") or one["status"]
        for one in written
    ]
    assert tuple(found) == reasons


def test_errors_have_the_form_of_each_dialect() -> None:
    of_openai = {"message": "m", "type": "rate_limit_error", "param": "n", "code": "429"}
    for path in (CHAT, TEXTS, RESPONSES, GENERATE):
        assert DIALECTS[path].error(429, "m", "n") == {"error": of_openai}
    of_anthropic = {"type": "error", "error": {"type": "rate_limit_error", "message": "m"}}
    assert MESSAGES.error(429, "m", "n") == of_anthropic
    assert MESSAGES.error_event(429, "m").startswith(b"event: error\ndata: ")
    assert MESSAGES.error(500, "m")["error"]["type"] == "api_error"
    assert DIALECTS[CHAT].error(500, "m")["error"]["type"] == "server_error"
    assert MESSAGES.counted(4) == {"input_tokens": 4}
