"""An agent with the plain `anthropic` client. Only `reward` is for Millrace."""

from anthropic import Anthropic

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def solve(row, base_url, key):
    client = Anthropic(base_url=base_url, api_key=key)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = client.messages.create(model="policy", max_tokens=64, messages=messages, tools=[MULTIPLY])
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result(call.input)} for call in calls
        ]
        messages.append({"role": "user", "content": results})


def result(numbers):
    try:
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
