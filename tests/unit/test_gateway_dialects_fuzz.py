"""Requests with damage are a call or are refused, and nothing else happens."""

from __future__ import annotations

import json
import os
import random
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from tests.gateway_replies import CALLS, TOOL
from tests.unit.gateway_requests import recorded

from millrace.episodes.gateway.calls import Call, RefusedCall
from millrace.episodes.gateway.local_agents import COUNT_TOKENS, DIALECTS, MESSAGES

NUM_DAMAGED = int(os.environ.get("MILLRACE_FUZZ_REQUESTS", "10000"))
SEEDS = 4
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.0, 1.5, 1e300, 2**70, "", "x", "auto", "none", "required", "tool",
    "assistant", "developer", "function", "text", "image_url", [], [None], ["x"], [1], [-1], [[]], [["x"]],
    [[1, 2]], {}, {"x": 1}, {"type": "text"}, {"type": "text", "text": 1}, {"type": "image"},
    {"type": "function", "name": "f"}, {"type": ["text"]}, {"role": "user"}, [{"type": "thinking"}],
    [{"type": "tool_use", "name": "f", "input": [1]}], {"role": "tool", "content": [{"text": "x"}]},
]  # fmt: skip
NAMES = ["type", "role", "content", "text", "id", "name", "n", "stream", "x"]
EXTRA: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "Hi."}], "name": "d"}],
            "tools": [TOOL],
            "tool_choice": "auto",
            "n": 1,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "logit_bias": {},
            "functions": [],
            "max_tokens": 3,
            "stop": ["a", "b"],
            "seed": 1,
        },
    ),
    ("/v1/completions", {"prompt": ["x"], "echo": False, "suffix": None, "best_of": 1, "logprobs": 0}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "text"}, "verbosity": "low"}}),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": True}]},
            ],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: v"},
                {"type": "text", "text": "s"},
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low"},
            "mcp_servers": [],
        },
    ),
    (
        "/inference/v1/generate",
        {
            "model": "m",
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 3, "stop": ["x"], "logprobs": 1, "n": 1, "stop_token_ids": [1]},
            "cache_salt": "1",
            "features": None,
            "stream_options": {"include_usage": True},
        },
    ),
]


def damage(root: list[Any], rng: random.Random) -> None:
    """Make one node of the tree junk, or missing, doubled, or found under another name."""
    place: Any = root
    key: Any = 0
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    way = rng.random()
    if way < 0.6:
        place[key] = deepcopy(rng.choice(JUNK))
    elif way < 0.75 and place is not root:
        del place[key]
    elif way < 0.85:
        place[key] = [place[key], deepcopy(place[key])]
    elif isinstance(place, dict):
        place[rng.choice(NAMES)] = deepcopy(place[key])
    else:
        place.insert(0, deepcopy(rng.choice(JUNK)))


def damaged(body: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        at = rng.randrange(len(body))
        return body[:at] if rng.random() < 0.3 else body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
    root = [json.loads(body)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        damage(root, rng)
    return json.dumps(root[0]).encode()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_request_is_a_call_or_is_refused_in_words(seed: int) -> None:
    rng = random.Random(seed)
    corpus = [(one["path"], json.dumps(one["body"]).encode()) for one in recorded().values()]
    corpus += [(path, json.dumps(body).encode()) for path, body in EXTRA]
    num_read = 0
    for _ in range(NUM_DAMAGED // SEEDS):
        path, body = rng.choice(corpus)
        body = damaged(body, rng)
        read = MESSAGES.read_count if path == COUNT_TOKENS else DIALECTS[path].read
        try:
            call = read(body)
        except RefusedCall as refused:
            assert refused.status == 400 and len(str(refused)) > 10
            continue
        num_read += 1
        assert msgspec.convert(msgspec.to_builtins(call), Call, strict=True) == call
        assert call.messages or call.prompt is not None
        dialect = DIALECTS.get(path, MESSAGES)
        msgspec.json.encode(dialect.reply(call, CALLS))
        b"".join(dialect.events(call, CALLS))
    assert NUM_DAMAGED // SEEDS * 0.2 < num_read < NUM_DAMAGED // SEEDS * 0.9


@pytest.mark.parametrize("path", sorted(DIALECTS))
@pytest.mark.parametrize(
    "body", [b"", b"[", b"[" * 100_000, b"null", b"[]", b'"x"', b"\xff", b'{"a":NaN}', b"{}"]
)
def test_a_body_that_is_no_request_is_refused(path: str, body: bytes) -> None:
    with pytest.raises(RefusedCall):
        DIALECTS[path].read(body)


def test_arguments_nested_without_end_are_refused() -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000  # whatever limit of recursion a library has set
    body = (
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}]}' % deep
    )
    with pytest.raises(RefusedCall):
        DIALECTS["/v1/chat/completions"].read(body)
