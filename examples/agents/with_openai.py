"""An agent with the plain `openai` client. Only `reward` is for Millrace."""

import json

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def solve(row, base_url, key):
    client = OpenAI(base_url=f"{base_url}/v1", api_key=key)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[MULTIPLY])
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": result(call.function.arguments)}
            for call in message.tool_calls
        ]


def result(arguments):
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
