"""What the SDKs of OpenAI and Anthropic make of streams that fail, cut calls, and named waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from tests.gateway_replies import PARAMETERS, TEXT, TOOL
from tests.gateways import WAIT_S, taken, until

from millrace.conversations.tokenizer import load_tokenizer
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.http_answer import HttpAnswer
from millrace.episodes.gateway.local_agents import DIALECTS
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, Session
from millrace.episodes.gateway.surroundings import GatewayLimits

MESSAGES: Any = [{"role": "user", "content": "How is it?"}]
FLAT: Any = {"type": "function", **TOOL["function"]}
OF_ANTHROPIC: Any = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"model": "policy", "messages": MESSAGES, "tools": [TOOL]},
    "responses": {"model": "policy", "input": MESSAGES, "tools": [FLAT]},
    "messages": {"model": "policy", "messages": MESSAGES, "tools": [OF_ANTHROPIC], "max_tokens": 500},
}
ERRORS = (openai.APIError, anthropic.APIError)
kinds = pytest.mark.parametrize("kind", ASKED)
ways = pytest.mark.parametrize("way", ["sync", "async"])
forms = pytest.mark.parametrize("stream", [False, True])


class Served:
    """A gateway, and a session of it. `begun`: a stream has begun. `waits`: what the SDK waits before each
    retry, which it does not wait here."""

    def __init__(self, **limits: Any) -> None:
        self.sessions, self.faults, self.begun = OpenSessions(), list[str](), threading.Event()
        self.waits = list[float]()
        of_test = GatewayLimits(grace_s=0.0, keepalive_s=0.05, **limits)
        self.server = GatewayServer(self.sessions, DIALECTS, limits=of_test, on_fault=self.faults.append)
        self.session: Session = self.sessions.open()

    def ask(self, kind: str, way: str, stream: bool, retries: int = 0) -> Any:
        """The whole answer, as the SDK hands it to its caller."""
        return (
            asyncio.run(self._later(kind, stream, retries))
            if way == "async"
            else self._now(kind, stream, retries)
        )

    def _now(self, kind: str, stream: bool, retries: int) -> Any:
        asked = ASKED[kind]
        with self._client(kind, openai.OpenAI, anthropic.Anthropic, retries) as client:
            if kind == "responses":
                if not stream:
                    return client.responses.create(**asked)
                return [event for event in client.responses.create(stream=True, **asked)][-1].response
            asks = client.chat.completions if kind == "chat" else client.messages
            if not stream:
                return asks.create(**asked)
            with asks.stream(**asked) as events:
                try:
                    return events.get_final_completion() if kind == "chat" else events.get_final_message()
                except openai.LengthFinishReasonError as cut:  # of the helper, whatever was cut
                    return cut.completion

    async def _later(self, kind: str, stream: bool, retries: int) -> Any:
        asked = ASKED[kind]
        async with self._client(kind, openai.AsyncOpenAI, anthropic.AsyncAnthropic, retries) as client:
            if kind == "responses":
                if not stream:
                    return await client.responses.create(**asked)
                return [event async for event in await client.responses.create(stream=True, **asked)][
                    -1
                ].response
            asks = client.chat.completions if kind == "chat" else client.messages
            if not stream:
                return await asks.create(**asked)
            async with asks.stream(**asked) as events:
                of_kind = events.get_final_completion if kind == "chat" else events.get_final_message
                try:
                    return await of_kind()
                except openai.LengthFinishReasonError as cut:
                    return cut.completion

    def _client(self, kind: str, of_openai: Any, of_anthropic: Any, retries: int) -> Any:
        named = {"api_key": self.session.key, "max_retries": retries, "timeout": WAIT_S}
        of_http = httpx2.AsyncClient if "Async" in of_openai.__name__ else httpx2.Client
        named["http_client"] = of_http(verify=False)  # certificates take most of a client's start
        if kind == "messages":
            client = of_anthropic(base_url=self.server.url, **named)
        else:
            client = of_openai(base_url=f"{self.server.url}/v1", **named)
        decided = client._calculate_retry_timeout

        def at_once(*args: Any, **more: Any) -> float:
            self.waits.append(decided(*args, **more))
            return 0.0

        client._calculate_retry_timeout = at_once
        return client

    def drop(self) -> None:
        """Break the connections that wait."""
        around = self.server._around
        assert around is not None
        for refuse in list(around.waiting):
            around.loop.call_soon_threadsafe(refuse.__self__._connection.stream.close)  # type: ignore[attr-defined]


@contextmanager
def acting(act: Callable[[], None]) -> Iterator[None]:
    """What the environment does meanwhile."""
    failed = list[BaseException]()

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive() and not failed, failed


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    opened = list[Served]()
    honest = HttpAnswer.keep_alive

    def keep_alive(answer: HttpAnswer) -> None:
        honest(answer)
        opened[-1].begun.set()

    monkeypatch.setattr(HttpAnswer, "keep_alive", keep_alive)

    def serve(**limits: Any) -> Served:
        opened.append(Served(**limits))
        opened[-1].server.start()
        return opened[-1]

    yield serve
    for one in opened:
        one.session.end()
        one.server.close()
        assert not one.faults


FAILURES: dict[str, tuple[Callable[[Served, Any], object], str]] = {
    "the engine is gone": (lambda _, call: call.refuse(RefusedCall("no engine", 503)), "no engine"),
    "a wait is named": (
        lambda _, call: call.refuse(RefusedCall("ask later", 429, retry_after_s=5)),
        "ask later",
    ),
    "the episode is closed": (lambda served, _: served.session.end(), "this episode has ended"),
    "the worker ends": (lambda served, _: served.server.close(), "the gateway is closing"),
}


@kinds
@ways
@pytest.mark.parametrize("failure", FAILURES)
def test_a_stream_that_fails_after_it_began_is_an_error_in_words(
    serving: Callable[..., Served], kind: str, way: str, failure: str
) -> None:
    served, (fail, words) = serving(), FAILURES[failure]

    def act() -> None:
        call = taken(served.session)
        assert served.begun.wait(WAIT_S)
        fail(served, call)

    with acting(act), pytest.raises(ERRORS, match=words):
        served.ask(kind, way, stream=True, retries=2)
    assert served.session.counts.calls == 1 and not served.waits


@kinds
@ways
def test_a_stream_that_waits_too_long_is_an_error_and_the_same_request_gets_the_reply(
    serving: Callable[..., Served], kind: str, way: str
) -> None:
    served = serving(call_s=0.2)
    with pytest.raises(ERRORS, match="no reply within"):
        served.ask(kind, way, stream=True, retries=2)
    taken(served.session).answer(TEXT)
    assert said(kind, served.ask(kind, way, stream=True))[:2] == ("stop", TEXT.content)
    assert served.session.counts.calls == served.session.counts.replayed == 1


@kinds
@ways
def test_a_connection_that_breaks_in_a_stream_is_an_error(
    serving: Callable[..., Served], kind: str, way: str
) -> None:
    served = serving()

    def act() -> None:
        taken(served.session)
        assert served.begun.wait(WAIT_S)
        served.drop()

    with acting(act), pytest.raises((*ERRORS, httpx2.HTTPError)):
        served.ask(kind, way, stream=True, retries=2)
    assert served.session.counts.calls == 1


def said(kind: str, answer: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Why it ended in the words of chats, its text, and its calls with their arguments."""
    if kind == "chat":
        (choice,) = answer.choices
        calls = [one.function for one in choice.message.tool_calls or ()]
        return (
            choice.finish_reason,
            choice.message.content or "",
            [(one.name, json.loads(one.arguments)) for one in calls],
        )
    if kind == "responses":
        calls = [one for one in answer.output if one.type == "function_call"]
        assert all(one.status == "completed" for one in calls)
        finish = {"incomplete": "length", "completed": "tool_calls" if calls else "stop"}[answer.status]
        return finish, answer.output_text, [(one.name, json.loads(one.arguments)) for one in calls]
    finish = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop"}[answer.stop_reason]
    texts = [one.text for one in answer.content if one.type == "text"]
    uses = [one for one in answer.content if one.type == "tool_use"]
    return finish, "".join(texts), [(one.name, one.input) for one in uses]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ankara"}}'
WHOLE = ("weather", {"city": "Ankara"})
CUTS: dict[str, list[Any]] = {
    '<tool_call>{"name": "weather", "arguments": {': [],
    '<tool_call>{"name": "weather", "arguments": {"city": "An': [],
    '<tool_call>{"name": "weather", "arguments": {"city": "Ankara"}': [],
    CALL: [WHOLE],
    f"{CALL}</tool_call>": [WHOLE],
    f'{CALL}</tool_call><tool_call>{{"name": "weather", "arguments": {{"city": "An': [],
    f"Look.{CALL}</tool_call>{CALL}": [WHOLE, WHOLE],
    'weather(city="An': [],
    "<think>weather(city=1": [],
}


@kinds
@ways
@pytest.mark.parametrize("text", CUTS)
def test_a_call_is_there_whole_or_not_at_all_and_streams_have_the_same(
    serving: Callable[..., Served], model: Path, kind: str, way: str, text: str
) -> None:
    served, tokenizer = serving(), load_tokenizer(model)

    def act() -> None:
        for _ in range(2):
            call = taken(served.session)
            ids = tokenizer.encode(text, add_special_tokens=False)
            turn = SampledTurn(ids=ids, logprobs=[], finish="length")
            call.answer(Replies(tokenizer).make("r1", call.call, [3], turn))

    with acting(act):
        whole, streamed = (said(kind, served.ask(kind, way, stream=stream)) for stream in (False, True))
    assert whole == streamed
    assert whole[0] == "length" and whole[2] == CUTS[text]
    if not whole[2] and "<think>" not in text:
        assert whole[1] == text


@kinds
@ways
@forms
def test_an_sdk_waits_as_long_as_it_is_told_and_its_retry_is_the_only_turn(
    serving: Callable[..., Served], kind: str, way: str, stream: bool
) -> None:
    """Of a session that has as many calls as may wait."""
    served = serving()
    served.session._calls_open_max = 0

    def act() -> None:
        until(lambda: bool(served.waits))
        taken(served.session).answer(TEXT)

    def permit(seconds: float) -> None:
        list.append(served.waits, seconds)
        served.session._calls_open_max = 1

    served.waits = type("Waits", (list,), {"append": lambda _, seconds: permit(seconds)})()
    with acting(act):
        assert said(kind, served.ask(kind, way, stream, retries=2))[1] == TEXT.content
    assert served.waits == [15.0]
    assert (served.session.counts.calls, served.session.counts.refused) == (1, 1)


@kinds
@ways
@forms
@pytest.mark.parametrize("lost", ["late", "broken"])
def test_the_retry_of_a_call_that_runs_is_no_second_turn(
    serving: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    way: str,
    stream: bool,
    lost: str,
) -> None:
    served = serving(call_s=0.05 if lost == "late" and not stream else WAIT_S)
    if stream:  # which has not begun
        monkeypatch.setattr(HttpAnswer, "keep_alive", lambda _: None)

    def act() -> None:
        call = taken(served.session)
        if served.server._limits.call_s == WAIT_S:
            served.drop()
        until(lambda: served.session.counts.joined > 0)
        call.answer(TEXT)

    with acting(act):
        assert said(kind, served.ask(kind, way, stream, retries=100_000))[1] == TEXT.content
    assert served.session.counts.calls == 1 and served.session.counts.joined >= 1
    assert len(served.waits) >= 1 and all(0 < one <= 60 for one in served.waits)


@kinds
@ways
@forms
@pytest.mark.parametrize("status", [400, 409, 503])
def test_no_sdk_repeats_what_no_retry_cures(
    serving: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    way: str,
    stream: bool,
    status: int,
) -> None:
    served = serving()
    if stream:
        monkeypatch.setattr(HttpAnswer, "keep_alive", lambda _: None)
    with acting(lambda: taken(served.session).refuse(RefusedCall("never", status)) and None):
        with pytest.raises(ERRORS, match="never") as refused:
            served.ask(kind, way, stream, retries=2)
    assert getattr(refused.value, "status_code", None) == status
    assert served.session.counts.calls == 1 and not served.waits
