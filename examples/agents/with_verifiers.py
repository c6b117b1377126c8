"""A taskset and a harness of `verifiers` 0.4, run by its own code. The gateway is its endpoint.

Needs: pip install 'verifiers>=0.4,<0.5', and rows with `index`. With `variables = {RENDERER = "MODEL"}`,
verifiers makes the tokens of each prompt by that model's chat template, and asks `/inference/v1/generate`.
"""

import os
import re

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Chat", "Products"]


class Product(vf.TaskData):
    answer: str


class Multiply(vf.Task[Product]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Products(vf.Taskset[Multiply, vf.TasksetConfig]):
    def load(self):
        for a in range(10, 100):
            yield Multiply(Product(prompt=f"{a}*7=", answer=str(a * 7)))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks again until the reply is a number, in this process. Built-in harnesses start programs with uv."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(3):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            text = reply.choices[0].message.content or ""
            if re.fullmatch(r"\d+", text):
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "A number."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def solve(row, base_url, key):
    client = {"base_url": f"{base_url}/v1", "api_key_var": "OPENAI_API_KEY", "type": "eval"}
    if renderer := os.environ.get("RENDERER"):
        client |= {"type": "train", "renderer_model_name": renderer}
    seat = {"model": "policy", "client": client, "runtime": {"type": "subprocess"}}
    async with vf.Agent(vf.AgentConfig(**seat, harness={"id": "with_verifiers"})) as agent:
        (task,) = Products(vf.TasksetConfig(id="with_verifiers")).include(idx=[row["index"]])
        trace = await agent.run(task)
    if trace.errors:
        raise RuntimeError(str(trace.errors))
    return {"reward": trace.reward, "turns": trace.num_turns}


def reward(end):
    return {"verifiers": end.returned["reward"]}
