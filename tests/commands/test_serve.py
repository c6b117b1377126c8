"""A model behind an OpenAI-compatible address: many clients, errors, and a run whose judge it is."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import string
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.runs import summary, train

from conformance import WAIT_S
from millrace.conversations.tokenizer import ASSISTANT, load_tokenizer, make_character_tokenizer
from millrace.core.types import Sampling
from millrace.rewards.judge import FILE
from millrace.serve.completions import Completions
from millrace.serve.serve_command import Endpoints
from millrace.serve.shared_engine import EngineFailed, SharedEngine

pytestmark = pytest.mark.usefixtures("warm")
SAID = "SCORE: 7"
MAX_TOKENS = 1500


def make_judge(directory):
    """A model that says `SCORE: 7` after any chat: each token alone decides what follows it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_character_tokenizer(directory, string.printable)
    tokenizer = load_tokenizer(directory)
    size = len(tokenizer) + len(tokenizer) % 2
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    ids = [*tokenizer.convert_tokens_to_ids([ASSISTANT, *SAID]), tokenizer.eos_token_id]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for now, then in itertools.pairwise(ids):
            model.lm_head.weight[then, now] = 1.0
    model.save_pretrained(directory)


@contextmanager
def serving(model, *options):
    """The command, from its first line to its end by SIGTERM. Yields its port."""
    command = [sys.executable, "-m", "millrace", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline().strip().removesuffix("/v1").rpartition(":")[2])
        finally:
            process.terminate()
            assert process.wait(WAIT_S) == 0


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("serve") / "judge"
    make_judge(directory)
    return directory


@pytest.fixture(scope="module")
def port(warm, judge):
    with serving(judge, "--slots", "4") as port:
        yield port


def ask(port, path, body=None, **headers):
    """The status, the answer and its headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    method = "GET" if content is None else "POST"
    connection.request(method, path, content, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    reply = json.loads(answer.read())
    connection.close()
    return answer.status, reply, answer.headers


def chat(port, text="Well?", **more):
    status, reply, _ = ask(
        port, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}
    )
    assert status == 200, reply
    return reply


def test_a_chat_is_rendered_by_the_template_and_its_answer_ends_with_the_end_token(port, judge):
    reply = chat(port, temperature=0, model=str(judge))
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SAID},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len("Well?") + 3  # who speaks, the end of the turn, who speaks next
    assert reply["usage"] == {"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9}
    assert reply["object"] == "chat.completion" and reply["model"] == str(judge)


def test_an_answer_ends_before_a_stop_string_or_at_its_most_tokens(port):
    choice = chat(port, temperature=0, stop=[":", "x"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("SCORE", "stop")
    choice = chat(port, temperature=0, max_completion_tokens=3)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("SCO", "length")


def test_text_is_continued(port):
    status, reply, _ = ask(port, "/v1/completions", {"prompt": "SC", "temperature": 0.0, "stop": " "})
    assert status == 200 and reply["choices"][0]["text"] == "ORE:"


def test_health_and_the_model_are_told(port, judge):
    assert ask(port, "/health")[:2] == (200, {"status": "ok", "requests": 0})
    assert ask(port, "/v1/models")[1]["data"][0]["id"] == str(judge)


def test_clients_at_once_get_equal_texts_for_equal_seeds_and_others_for_others(port):
    def say(seed):
        return chat(port, temperature=2.0, max_tokens=40, seed=seed)["choices"][0]["message"]["content"]

    seeds = [seed for seed in range(6) for _ in range(2)]
    with ThreadPoolExecutor(len(seeds)) as clients:
        texts = list(clients.map(say, seeds))
    assert texts[::2] == texts[1::2] == [say(seed) for seed in range(6)]
    assert len(set(texts)) > 3


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, 400, "stream"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": []}, 400, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 2}, 400, "n"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": 1e-320}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": 1e-40}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": 0.0099}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "top_p": 1e-40}, 400, "top_p"),
        ({"messages": [{"role": "user", "content": "a" * (3 << 20)}]}, 400, None),
        ({"messages": [{"role": "user", "content": "a"}], "model": "another"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a" * MAX_TOKENS}]}, 400, None),
        (b'{"messages": [', 400, None),
        (b" " * (9 << 20), 413, None),
    ],
)
def test_what_cannot_be_answered_is_refused_by_the_name_of_its_field(port, body, status, field):
    got, reply, _ = ask(port, "/v1/chat/completions", body)
    error = reply["error"]
    assert (got, error["code"], error["param"]) == (status, status, field), reply
    assert error["type"] == "invalid_request_error" and (field is None or f"{field}" in error["message"])


def test_a_page_of_a_browser_and_a_wrong_path_are_refused(port):
    assert ask(port, "/v1/models", Host="elsewhere.example")[0] == 403
    assert ask(port, "/v1/completions", {"prompt": "S"}, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(port, "/v1/embeddings", {})[0] == 404


@contextmanager
def endpoints(judge, tokenizer=None, slots=1, **limits):
    """In this process: the engine, which decodes nothing until a test says so, and the port."""
    from millrace.engines.own.load_engine import load_engine

    engine = SharedEngine(load_engine(str(judge), slots=slots, max_sequence_tokens=64), **limits)
    completions = Completions(
        engine, tokenizer or load_tokenizer(judge), model="judge", max_sequence_tokens=64
    )
    server = Endpoints("127.0.0.1", 0, completions)
    with ThreadPoolExecutor(8) as threads:
        try:
            yield engine, server.port, threads
        finally:
            engine.stop()
            server.close()


def wait_for(engine, num_requests):
    until_s = time.monotonic() + WAIT_S
    while engine.num_requests < num_requests:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_who_finds_the_queue_full_is_told_when_to_ask_again_and_the_end_answers_who_waits(judge):
    with endpoints(judge, requests_max=2, answer_s=WAIT_S) as (engine, port, threads):
        waiting = [threads.submit(ask, port, "/v1/completions", {"prompt": one}) for one in "ab"]
        wait_for(engine, 2)
        status, reply, headers = ask(port, "/v1/completions", {"prompt": "c"})
        assert (status, headers["Retry-After"], reply["error"]["type"]) == (503, "5", "server_error")
        engine.stop()
        engine.run()
        for one in waiting:
            status, reply, headers = one.result()
            assert status == 503 and "the server ends" in reply["error"]["message"]
            assert headers["x-should-retry"] == "false" and "Retry-After" not in headers


def test_a_request_that_is_not_done_in_time_is_given_up(judge):
    with endpoints(judge, requests_max=2, answer_s=0.0) as (engine, port, threads):
        running = threads.submit(engine.run)
        status, _, headers = ask(port, "/v1/completions", {"prompt": "S", "temperature": 0})
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert engine.num_requests == 0
        engine.stop()
        running.result(WAIT_S)


class Failing:
    """An engine that fails at a step with a certain prompt, after `steps` steps with it."""

    def __init__(self, engine, prompt, *, steps):
        self._engine, self._prompt, self._steps, self._under_way = engine, prompt, steps, {}

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, works):
        works = list(works)
        self._under_way |= {one.trajectory_id: one for one in works}
        self._engine.submit(works)

    def release(self, trajectory_ids):
        for one in trajectory_ids:
            self._under_way.pop(one, None)
        return self._engine.release(trajectory_ids)

    def step(self):
        if any(list(one.prompt) == self._prompt for one in self._under_way.values()):
            self._steps -= 1
            if self._steps < 0:
                raise RuntimeError("a step failed")
        self._engine.step()


@pytest.mark.parametrize("steps", [0, 5])
def test_a_request_with_which_the_engine_fails_gets_the_error_and_the_others_their_answers(judge, steps):
    tokenizer = load_tokenizer(judge)
    with endpoints(judge, slots=3, requests_max=8, answer_s=WAIT_S) as (engine, port, threads):
        engine._engine = Failing(engine._engine, tokenizer.encode("bad"), steps=steps)
        asked = {"temperature": 0, "max_tokens": 9}
        prompts = ["S", "bad", "SC", "SCO"]
        waiting = [threads.submit(ask, port, "/v1/completions", asked | {"prompt": one}) for one in prompts]
        wait_for(engine, len(prompts))
        running = threads.submit(engine.run)
        answers = {one: wait.result(WAIT_S) for one, wait in zip(prompts, waiting, strict=True)}
        status, reply, headers = answers.pop("bad")
        assert status == 500 and "a step failed" in reply["error"]["message"]
        assert headers["x-should-retry"] == "false"
        texts = {one: reply["choices"][0]["text"] for one, (_, reply, _) in answers.items()}
        assert {one + text for one, text in texts.items()} == {SAID}
        assert ask(port, "/v1/completions", asked | {"prompt": "SCOR"})[0] == 200
        engine.stop()
        running.result(WAIT_S)


def test_a_log_prob_that_is_no_number_is_the_error_of_its_request_alone(judge):
    tokenizer = load_tokenizer(judge)
    with endpoints(judge, slots=4, requests_max=8, answer_s=WAIT_S) as (engine, _, threads):
        hot, cold = Sampling(max_tokens=9, temperature=1e-40), Sampling(max_tokens=9, temperature=0.0)
        asked = [
            (tokenizer.encode("S"), cold),
            (tokenizer.encode("SC"), hot),
            (tokenizer.encode("SCO"), cold),
        ]
        first, bad, last = [engine.submit(prompt, sampling, 0) for prompt, sampling in asked]
        running = threads.submit(engine.run)
        with pytest.raises(EngineFailed, match="log-prob"):
            bad.result(WAIT_S)
        for prompt, answer in (("S", first), ("SCO", last)):
            text = tokenizer.decode(answer.result(WAIT_S).tokens, skip_special_tokens=True)
            assert prompt + text == SAID
        engine.stop()
        running.result(WAIT_S)


def test_an_engine_that_completes_nothing_ends_the_server(judge):
    with endpoints(judge, requests_max=2, answer_s=WAIT_S) as (engine, port, threads):

        def broken():
            raise RuntimeError("the device is gone")

        engine._engine.step = broken
        waiting = threads.submit(ask, port, "/v1/completions", {"prompt": "S"})
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.run()
        assert waiting.result(WAIT_S)[0] == 503


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{",
    ],
)
def test_clients_that_send_no_whole_request_shut_nobody_out(port, begun):
    with ExitStack() as stack:
        for _ in range(400):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            slow.sendall(begun.replace(b"%d", str(port).encode()))
        assert chat(port, temperature=0)["choices"][0]["message"]["content"] == SAID


def test_a_request_that_does_not_come_whole_in_time_is_left(judge):
    from millrace.episodes.gateway.surroundings import GatewayLimits

    engine = SharedEngine(None, requests_max=1, answer_s=1.0)
    completions = Completions(engine, load_tokenizer(judge), model="m", max_sequence_tokens=8)
    server = Endpoints("127.0.0.1", 0, completions, limits=GatewayLimits(idle_s=0.1, body_s=0.1))
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        body = "Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        for begun in (head, head + body):
            with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as slow:
                slow.sendall(begun.encode())
                assert slow.recv(1) == b""
    finally:
        server.close()


def test_equal_requests_at_the_same_time_are_computed_once(judge):
    with endpoints(judge, requests_max=1, answer_s=WAIT_S) as (engine, port, threads):
        body = {"prompt": "S", "temperature": 1.0, "seed": 5}
        waiting = [threads.submit(ask, port, "/v1/completions", body) for _ in range(2)]
        running = threads.submit(engine.run)
        first, second = (one.result()[1]["choices"] for one in waiting)
        assert first == second
        engine.stop()
        running.result(WAIT_S)


def test_without_a_chat_template_messages_follow_each_other(judge):
    tokenizer = load_tokenizer(judge)
    tokenizer.chat_template = None
    with endpoints(judge, tokenizer, requests_max=1, answer_s=WAIT_S) as (engine, port, threads):
        running = threads.submit(engine.run)
        messages = [{"role": role, "content": role[0]} for role in ("system", "user")]
        _, reply, _ = ask(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert reply["usage"]["prompt_tokens"] == len("s\n\nu\n\n")
        engine.stop()
        running.result(WAIT_S)


def test_a_run_whose_judge_is_a_served_model_closes_its_accounts(port, judge, start, tmp_path):
    reward = (
        f"{{kind='judge', url='http://127.0.0.1:{port}/v1', model='{judge}', rubric='Good?', workers=2, "
        "max_tokens=32}"
    )
    run = train(start, tmp_path / "run", f"reward={reward}")
    accounting = summary(run)["accounting"]
    ended = sum(accounting[name] for name in ("trained", "failed", "rejected", "stale", "abandoned"))
    assert accounting["admitted"] == ended + accounting["in_flight"]
    assert accounting["trained"] > 0 == accounting["failed"] and (run.path / FILE).exists()


def test_a_model_with_fewer_positions_is_refused(judge):
    command = [sys.executable, "-m", "millrace", "serve", str(judge), "--max-sequence-tokens", "9999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2 and f"{MAX_TOKENS} positions" in done.stderr
