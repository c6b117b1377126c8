"""The SDKs of OpenAI and Anthropic ask a gateway, and parse each reply and stream as they parse their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from msgspec.structs import replace
from tests.agents.played import record
from tests.agents.stub_gateway import NUM_TOKENS, StubGateway, serving
from tests.gateway_replies import CALLS, CUT, PARAMETERS, TEXT, TOOL

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from millrace.episodes.gateway.calls import ChatTurn, to_object

ASK: Any = [{"role": "user", "content": "How is it?"}]
RESULTS = ["rain", "sun"]
FLAT: Any = {"type": "function", **TOOL["function"], "strict": False}
OF_ANTHROPIC: Any = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    with serving() as gateway:
        yield gateway


@pytest.fixture
def client(gateway: StubGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def claude(gateway: StubGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="key", max_retries=0, timeout=20) as client:
        yield client


def read_back(gateway: StubGateway) -> list[ChatTurn]:
    """The turns of the last request from the assistant's on."""
    turns = gateway.calls[-1].messages
    return turns[next(n for n, turn in enumerate(turns) if turn.role == "assistant") :]


ANSWERED = [
    CALLS.turn,
    ChatTurn(role="tool", content="rain", call_id="call_1"),
    ChatTurn(role="tool", content="sun", call_id="call_2"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_calls_of_tools_goes_on_with_an_equal_turn(
    gateway: StubGateway, client: openai.OpenAI, stream: bool
) -> None:
    gateway.replies = [CALLS, TEXT]
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "max_completion_tokens": 50}
    asked |= {"logprobs": True, "top_logprobs": 0, "extra_body": {"return_token_ids": True}}
    if stream:
        with client.chat.completions.stream(
            messages=ASK, stream_options={"include_usage": True}, **asked
        ) as events:
            completion: Any = events.get_final_completion()
        record(gateway.bodies[-1], "openai_chat_stream", "openai")
    else:
        completion = client.chat.completions.create(messages=ASK, temperature=0.5, **asked)
        record(gateway.bodies[-1], "openai_chat", "openai")
    choice = completion.choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == CALLS.content
    assert message.to_dict()["reasoning_content"] == CALLS.reasoning
    assert [one.function.arguments for one in message.tool_calls] == [one.arguments for one in CALLS.calls]
    assert [one.logprob for one in choice.logprobs.content] == CALLS.logprobs
    assert choice.logprobs.content[0].bytes == list(b"Wait")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 2)
    assert completion.to_dict()["prompt_token_ids"] == CALLS.prompt_ids
    assert choice.to_dict()["token_ids"] == CALLS.ids
    results: Any = [
        {"role": "tool", "tool_call_id": one.id, "content": content}
        for one, content in zip(message.tool_calls, RESULTS, strict=True)
    ]
    again = client.chat.completions.create(messages=[*ASK, message, *results], model="policy")
    record(gateway.bodies[-1], "openai_chat_results", "openai")
    assert again.choices[0].message.content == TEXT.content and again.choices[0].finish_reason == "stop"
    assert read_back(gateway) == ANSWERED


def test_the_chunks_of_a_chat_add_up_to_the_reply(gateway: StubGateway, client: openai.OpenAI) -> None:
    gateway.replies = [TEXT]
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(messages=ASK, model="policy", stream=True, stream_options=options)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == TEXT.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_text_the_ids_and_the_logprobs(
    gateway: StubGateway, client: openai.OpenAI, stream: bool
) -> None:
    gateway.replies = [TEXT]
    asked: Any = {"model": "policy", "prompt": [5, 6, 7], "logprobs": 1, "max_tokens": 9, "stop": ["\n"]}
    asked["extra_body"] = {"return_token_ids": True}
    if stream:
        chunks = list(client.completions.create(stream=True, **asked))
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        choices = [client.completions.create(**asked).choices[0]]
        record(gateway.bodies[-1], "openai_completion", "openai")
    assert "".join(one.text for one in choices) == TEXT.text
    assert choices[-1].finish_reason == "stop"
    logprobs = next(one.logprobs for one in choices if one.logprobs)
    assert (logprobs.tokens, logprobs.token_logprobs) == (TEXT.pieces, TEXT.logprobs)
    assert logprobs.text_offset == [0, 5, 9]
    dicts = [one.to_dict() for one in choices]
    assert next(one["token_ids"] for one in dicts if one.get("token_ids")) == TEXT.ids
    assert next(one["prompt_token_ids"] for one in dicts if one.get("prompt_token_ids")) == TEXT.prompt_ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_calls_of_tools_goes_on_with_an_equal_turn(
    gateway: StubGateway, client: openai.OpenAI, stream: bool
) -> None:
    gateway.replies = [CALLS, TEXT]
    asked: dict[str, Any] = {"model": "policy", "tools": [FLAT], "instructions": "Be brief.", "store": False}
    asked |= {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    if stream:
        with client.responses.stream(input=ASK, **asked) as events:
            kinds = [one.type for one in events]
            response: Any = events.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        record(gateway.bodies[-1], "openai_responses_stream", "openai")
    else:
        response = client.responses.create(input=ASK, temperature=0.5, **asked)
        record(gateway.bodies[-1], "openai_responses", "openai")
    reasoning, message, *calls = response.output
    assert response.status == "completed" and response.output_text == CALLS.content
    assert reasoning.content[0].text == CALLS.reasoning
    assert [one.logprob for one in message.content[0].logprobs] == CALLS.logprobs
    assert [one.arguments for one in calls] == [one.arguments for one in CALLS.calls]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (2, 2)
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": content}
        for one, content in zip(calls, RESULTS, strict=True)
    ]
    items: Any = [*ASK, *(one.to_dict() for one in response.output), *results]
    again = client.responses.create(input=items, model="policy")
    record(gateway.bodies[-1], "openai_responses_results", "openai")
    assert again.output_text == TEXT.content
    assert read_back(gateway) == ANSWERED


def test_every_event_of_a_response_is_of_a_known_type(gateway: StubGateway, client: openai.OpenAI) -> None:
    gateway.replies = [CALLS]
    events = list(client.responses.create(input="How is it?", model="policy", stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    for one in events:
        type(one).model_validate(one.to_dict())  # a client builds objects without a check
        assert type(one).__name__ != "BaseModel"
    reasoning = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(reasoning) == CALLS.reasoning


def test_replies_are_of_the_types_of_the_sdk(gateway: StubGateway, client: openai.OpenAI) -> None:
    """A client builds objects without a check. So each is checked here."""
    for reply in (TEXT, CALLS, CUT):
        gateway.replies = [reply] * 3
        chat: Any = client.chat.completions.create(messages=ASK, model="policy", logprobs=True)
        text = client.completions.create(prompt="How", model="policy", logprobs=1)
        response = client.responses.create(input=ASK, model="policy", tools=[FLAT])
        for one in (chat, text, response):
            type(one).model_validate(one.to_dict())


def test_a_reply_that_was_cut_says_so(
    gateway: StubGateway, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    gateway.replies = [CUT] * 5
    chat = client.chat.completions.create(messages=ASK, model="policy")
    response = client.responses.create(input=ASK, model="policy")
    *_, last = client.responses.create(input=ASK, model="policy", stream=True)
    message = claude.messages.create(model="policy", max_tokens=1, messages=ASK)
    with claude.messages.stream(model="policy", max_tokens=1, messages=ASK) as events:
        streamed = events.get_final_message()
    assert chat.choices[0].finish_reason == "length"
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"
    assert message.stop_reason == streamed.stop_reason == "max_tokens"


def test_a_stop_sequence_that_ended_a_reply_is_named(
    gateway: StubGateway, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    gateway.replies = [replace(CUT, finish="stop", stop="END")] * 3
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": ASK, "stop_sequences": ["END"]}
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as events:
        streamed = events.get_final_message()
    assert message.stop_reason == streamed.stop_reason == "stop_sequence"
    assert message.stop_sequence == streamed.stop_sequence == "END"
    chat = client.chat.completions.create(messages=ASK, model="policy", stop=["END"])
    assert chat.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_with_tools_goes_on_with_an_equal_turn(
    gateway: StubGateway, claude: anthropic.Anthropic, stream: bool
) -> None:
    gateway.replies = [CALLS, TEXT]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "system": system, "tools": [OF_ANTHROPIC]}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["END"]}
    if stream:
        with claude.messages.stream(messages=ASK, **asked) as events:
            message = events.get_final_message()
        record(gateway.bodies[-1], "anthropic_messages_stream", "anthropic")
    else:
        message = claude.messages.create(messages=ASK, **asked)
        record(gateway.bodies[-1], "anthropic_messages", "anthropic")
    type(message).model_validate(message.to_dict())
    thinking, text, *uses = message.content
    assert thinking.type == "thinking" and thinking.thinking == CALLS.reasoning and thinking.signature
    assert text.type == "text" and text.text == CALLS.content
    assert [one.input for one in uses if one.type == "tool_use"] == [
        to_object(one.arguments) for one in CALLS.calls
    ]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 2)
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": content}
        for one, content in zip(CALLS.calls, RESULTS, strict=True)
    ]
    user = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    messages: Any = [*ASK, {"role": "assistant", "content": message.content}, user]
    again = claude.messages.create(model="policy", max_tokens=50, messages=messages)
    record(gateway.bodies[-1], "anthropic_messages_results", "anthropic")
    assert again.content[0].type == "text" and again.content[0].text == TEXT.content
    assert read_back(gateway) == [*ANSWERED, ChatTurn(role="user", content="And?")]


def test_tokens_are_counted(gateway: StubGateway, claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="policy", messages=ASK, tools=[OF_ANTHROPIC])
    record(gateway.bodies[-1], "anthropic_count_tokens", "anthropic")
    assert counted.input_tokens == NUM_TOKENS
    assert gateway.calls[0].messages[0].content == "How is it?"


def test_a_refusal_is_an_error_with_words_in_each_sdk(
    gateway: StubGateway, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError, match="more than one turn") as of_chat:
        client.chat.completions.create(messages=ASK, model="policy", n=2)
    assert of_chat.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="stored"):
        client.responses.create(input="And?", model="policy", previous_response_id="resp_1")
    with pytest.raises(anthropic.BadRequestError, match="forces a call"):
        claude.messages.create(
            model="policy",
            max_tokens=1,
            messages=ASK,
            tools=[OF_ANTHROPIC],
            tool_choice={"type": "tool", "name": "weather"},
        )


def test_an_error_in_a_stream_reaches_the_agent(
    gateway: StubGateway, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    gateway.replies, gateway.fails_in_stream = [TEXT] * 5, True
    with pytest.raises(openai.APIError, match="broken"):
        list(client.chat.completions.create(messages=ASK, model="policy", stream=True))
    with pytest.raises(openai.APIError, match="broken"):
        list(client.completions.create(prompt="How", model="policy", stream=True))
    with pytest.raises(openai.APIError, match="broken"):
        list(client.responses.create(input=ASK, model="policy", stream=True))
    with pytest.raises(openai.APIError, match="broken"):
        with client.responses.stream(input=ASK, model="policy") as events:
            events.get_final_response()
    with pytest.raises(anthropic.APIError, match="broken"):
        list(claude.messages.create(model="policy", max_tokens=1, messages=ASK, stream=True))


async def _agent_runs(gateway: StubGateway, kind: str, stream: bool) -> str:
    @function_tool
    def weather(city: str, days: int = 1) -> str:
        """The weather."""
        return f"{city}: rain for {days}"

    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="key", max_retries=0, timeout=20
    ) as client:
        of_kind: Any = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
        agent = Agent(
            name="Guide",
            instructions="Be brief.",
            model=of_kind("policy", client),
            tools=[weather],
            model_settings=ModelSettings(temperature=1.0),
        )
        config = RunConfig(tracing_disabled=True)
        if not stream:
            return (await Runner.run(agent, "How is it?", run_config=config)).final_output
        streamed = Runner.run_streamed(agent, "How is it?", run_config=config)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_an_agent_of_the_agents_sdk_calls_its_tool_and_ends(
    gateway: StubGateway, kind: str, stream: bool
) -> None:
    gateway.replies = [CALLS, TEXT]
    assert asyncio.run(_agent_runs(gateway, kind, stream)) == TEXT.content
    if not stream:
        record(gateway.bodies[-1], f"agents_{kind}", "openai-agents")
    first, *results = read_back(gateway)
    # In chat, the Agents SDK sends reasoning back to models of DeepSeek alone.
    assert first == (CALLS.turn if kind == "responses" else replace(CALLS.turn, reasoning=""))
    assert [turn.content for turn in results] == ["Zürich: rain for 2", "東京: rain for 1"]
