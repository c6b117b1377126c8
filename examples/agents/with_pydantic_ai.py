"""An agent of `pydantic-ai`. Only `reward` is for Millrace.

Needs: pip install 'pydantic-ai-slim[openai]'
"""

from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def solve(row, base_url, key):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=f"{base_url}/v1", api_key=key))
    try:
        return (await Agent(model, tools=[multiply]).run(row["prompt"])).output
    except UnexpectedModelBehavior:  # a tool was called wrongly, and again when asked to correct that
        return None


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
