"""Replies of a gateway that tests of dialects share, and a tool."""

from __future__ import annotations

from millrace.episodes.gateway.calls import CallOfTool, Reply

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS},
}

TEXT = Reply(
    id="r1",
    created=1_700_000_000,
    model="policy",
    text="Ça va, 世界!",
    content="Ça va, 世界!",
    prompt_ids=[5, 6, 7],
    ids=[10, 11, 12],
    pieces=["Ça va", ", 世界", "!"],
    logprobs=[-0.5, -1.25, -0.125],
)
CALLS = Reply(
    id="r2",
    created=1_700_000_001,
    model="policy",
    text="<think>Look.</think>Wait.<tool_call>...</tool_call>",
    content="Wait.",
    reasoning="Look it up.",
    calls=(
        CallOfTool("call_1", "weather", '{"city":"Zürich","days":2.0}'),
        CallOfTool("call_2", "weather", '{"city": "\\u6771\\u4eac"}'),
    ),
    finish="tool_calls",
    prompt_ids=[5, 6],
    ids=[20, 21],
    pieces=["Wait", "."],
    logprobs=[-0.25, -0.75],
)
CUT = Reply(
    id="r3",
    created=1_700_000_002,
    model="policy",
    text="One, tw",
    content="One, tw",
    finish="length",
    prompt_ids=[5],
    ids=[30],
    pieces=["One, tw"],
    logprobs=[-2.0],
)
