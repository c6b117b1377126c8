"""An agent of `smolagents`. It ends with the tool `final_answer`. Only `reward` is for Millrace.

Needs: pip install 'smolagents[openai]'
"""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def solve(row, base_url, key):
    model = OpenAIModel("policy", api_base=f"{base_url}/v1", api_key=key)
    return str(ToolCallingAgent([multiply], model, max_steps=4).run(row["prompt"]))


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
