"""An environment of the frozen v0 of `verifiers`, with a tool, run by its own code at the gateway.

Needs: pip install 'verifiers>=0.3.1,<0.4', and rows with `index`.
"""

import logging

import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def load_environment():
    """As in the package of an environment, which `vf.load_environment(name)` loads."""
    rows = [{"question": f"{a}*7=", "answer": str(a * 7)} for a in range(10, 100)]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), tools=[multiply], max_turns=3
    )


ENVIRONMENT = load_environment()  # once in each worker
logging.getLogger("verifiers").setLevel(logging.WARNING)


async def solve(row, base_url, key):
    endpoint = vf.ClientConfig(api_base_url=f"{base_url}/v1", api_key_var="OPENAI_API_KEY", max_retries=0)
    task = ENVIRONMENT.get_dataset()[row["index"]]
    output = await ENVIRONMENT.run_rollout(task, endpoint, "policy", {})
    if output["error"]:
        raise RuntimeError(str(output["error"]))
    return {"reward": output["reward"], "turns": output["metrics"]["num_turns"]}


def reward(end):
    return {"verifiers": end.returned["reward"]}
