"""An agent of LangChain, which is a graph of LangGraph. Only `reward` is for Millrace.

Needs: pip install langchain langchain-openai
"""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def solve(row, base_url, key):
    model = ChatOpenAI(model="policy", base_url=f"{base_url}/v1", api_key=key)
    agent = create_agent(model, [multiply])
    state = agent.invoke({"messages": [{"role": "user", "content": row["prompt"]}]})
    return state["messages"][-1].text


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
