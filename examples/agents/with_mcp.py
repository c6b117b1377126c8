"""An agent whose tools are those of an MCP server, a program of its own. Only `reward` is for Millrace.

Needs: pip install openai 'mcp>=2,<3'. The server here is mcp_multiply.py; any stdio server takes its place.
"""

import json
import sys
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI

SERVER = StdioServerParameters(
    command=sys.executable, args=[str(Path(__file__).with_name("mcp_multiply.py"))]
)


async def solve(row, base_url, key):
    model = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    messages = [{"role": "user", "content": row["prompt"]}]
    async with stdio_client(SERVER) as streams, ClientSession(*streams) as server:
        await server.initialize()
        tools = [as_function(tool) for tool in (await server.list_tools()).tools]
        while True:
            reply = await model.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                content = await result(server, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def as_function(tool):
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def result(server, function):
    try:
        answer = await server.call_tool(function.name, json.loads(function.arguments))
    except ValueError as error:
        return f"error: {error}"
    return "".join(part.text for part in answer.content if part.type == "text")


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
