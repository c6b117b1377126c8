"""A task of `inspect-ai`, with its agent and its scorer. Only `reward` is for Millrace.

Needs: pip install inspect-ai openai
"""

from inspect_ai import Task, eval_async
from inspect_ai.agent import AgentSubmit, react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.tool import tool


@tool
def multiply():
    async def execute(a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a * b)

    return execute


async def solve(row, base_url, key):
    model = get_model("openai-api/millrace/policy", base_url=f"{base_url}/v1", api_key=key)
    sample = Sample(input=row["prompt"], target=row["answer"])
    solver = react(tools=[multiply()], submit=AgentSubmit(answer_only=True))
    task = Task(dataset=[sample], solver=solver, scorer=match("exact"), message_limit=12)
    (log,) = await eval_async(task, model=model)
    if log.status != "success":
        raise RuntimeError(log.error.traceback)
    return log.results.scores[0].metrics["accuracy"].value


def reward(end):
    return {"inspect": end.returned or 0.0}
