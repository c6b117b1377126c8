"""Agents that `gateway.py` measures: functions that ask for chat completions by plain HTTP."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MEETING_S = 120.0


def converse(first: str, calls: int, complete: Callable[[bytes], bytes]) -> list[float]:
    """Ask `calls` times, each time with the whole conversation. Returns the milliseconds of each call, the
    agent's own JSON included."""
    messages, taken = [{"role": "user", "content": first}], []
    for _ in range(calls):
        began_s = time.perf_counter()
        answer = json.loads(complete(json.dumps({"model": "policy", "messages": messages}).encode()))
        content = answer["choices"][0]["message"]["content"]
        taken.append(round(1000 * (time.perf_counter() - began_s), 4))
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    return taken


def over_http(base_url: str, key: str) -> Callable[[bytes], bytes]:
    """Sends the body of a chat completion, always over the same connection."""
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=300)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def complete(body: bytes) -> bytes:
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer

    return complete


def solve(row: dict[str, Any], base_url: str, key: str) -> list[float]:
    """Returns the milliseconds of each call."""
    return converse(row["prompt"], row["calls"], over_http(base_url, key))


def rows() -> list[dict[str, Any]]:
    return [{"prompt": "b" * length + ">"} for length in range(1, 9)]


def meet(row: dict[str, Any], base_url: str, key: str) -> None:
    """Ask, wait until all `MEETING_AGENTS` agents have their first reply, and ask once more."""
    meeting, number = Path(os.environ["MEETING"]), int(os.environ["MEETING_AGENTS"])
    complete = over_http(base_url, key)
    converse(row["prompt"], 1, complete)
    if Path.cwd().parent.parent.name == "agents":  # of the run; the trial before it has one agent
        (meeting / Path.cwd().name).touch()
        deadline_s = time.monotonic() + MEETING_S
        while len(os.listdir(meeting)) < number and time.monotonic() < deadline_s:
            time.sleep(0.2)
    converse("a" + row["prompt"], 1, complete)


def reward(replies: list[str]) -> float:
    return float(len(replies[-1]) % 3)
