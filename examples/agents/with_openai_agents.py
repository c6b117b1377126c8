"""An agent with the `openai-agents` framework. Only `reward` is for Millrace."""

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def solve(row, base_url, key):
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="calculator", model=model, tools=[multiply])
    return (await Runner.run(agent, row["prompt"])).final_output


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
