#!/usr/bin/env bash
# mistral-common 1.13.1: a tool's text is read as JSON and written again, so the model sees another text.
#
# Expected. The documentation of ToolMessage.content: "str: Plain text output". So what a tool printed stands in the
#   prompt, as one JSON string.
# Seen. The tokenizers of version 3 pass the text through json.loads and json.dumps. A version number loses its zero, a
#   number with many digits is rounded, a number that is too large becomes Infinity, and quotes disappear.
# Output.
#   tool printed '3.10'                    prompt has "content": 3.1
#   tool printed '1.50'                    prompt has "content": 1.5
#   tool printed '12345678901234567890.5'  prompt has "content": 1.2345678901234567e+19
#   tool printed '1E400'                   prompt has "content": Infinity
#   tool printed '"quoted"'                prompt has "content": "quoted"
#   tool printed '{"version": 3.10}'       prompt has "content": {"version": 3.1}
# Why it matters. An agent that looks up a version, a price or an identifier cannot know the right answer, and its reward
#   is 0 for a fault of the prompt. An engine that renders with this package and a trainer that renders the text as it
#   is have different tokens for one conversation, and so different log-probs.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q mistral-common==1.13.1; } || exit 2

"$venv/bin/python" - <<'PY'
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizer = MistralTokenizer.v3(is_tekken=True)
tool = Tool(function=Function(name="look", description="", parameters={}))
call = ToolCall(id="123456789", function=FunctionCall(name="look", arguments="{}"))


def prompt(text):
    messages = [
        UserMessage(content="Look."),
        AssistantMessage(content=None, tool_calls=[call]),
        ToolMessage(content=text, tool_call_id=call.id),
    ]
    rendered = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=[tool])).text
    return rendered.split("[TOOL_RESULTS]")[1].split(', "call_id"')[0].removeprefix("{")


CASES = {
    "version 3.10": '"content": "version 3.10"',
    "3.10": '"content": 3.1',
    "1.50": '"content": 1.5',
    "12345678901234567890.5": '"content": 1.2345678901234567e+19',
    "1E400": '"content": Infinity',
    '"quoted"': '"content": "quoted"',
    '{"version": 3.10}': '"content": {"version": 3.1}',
}
for text, seen in CASES.items():
    print(f"tool printed {text!r:25} prompt has {prompt(text)}")
    assert prompt(text) == seen, f"changed: {text!r}"
PY
