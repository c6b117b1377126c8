"""An agent for whole runs: plain HTTP, 3 or 4 turns. Its file is copied beside the run's configuration.

Its calls depend on the row and the replies. One in four begins another conversation, as a summary does.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # of several runs in one process

from acting import digest, harm  # noqa: E402

LETTERS = str.maketrans("0123456789abcdef", "ab>ab>ab>ab>ab>a")


def solve(row: dict[str, Any], base_url: str, key: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=120)
    messages = [{"role": "user", "content": row["prompt"]}]
    said: list[str] = []
    reward = 0.0
    while True:
        reply = ask(connection, key, messages)
        if "ended" in reply:  # a budget has ended the episode
            return reward
        said.append(reply)
        harm(digest(row["number"], said[0]))
        answer = digest(row["number"], said)
        reward += (int(answer[3], 16) % 4) / 4
        if len(said) == 3 + int(digest(row["number"], said[:2])[0], 16) % 2:
            return reward
        text = answer[:3].translate(LETTERS)
        if answer[4] < "4":
            messages = [{"role": "user", "content": "a" + text}]
        else:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": text}]


def ask(connection: http.client.HTTPConnection, key: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "policy", "messages": messages})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    data = json.loads(response.read())
    assert response.status == 200, data
    return str(data["choices"][0]["message"]["content"])


def reward(end: Any) -> float:
    return float(end.returned or 0.0)


def main() -> None:
    """The same agent as a command."""
    row = json.loads(Path(os.environ["MILLRACE_ROW"]).read_text())
    base_url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    print(solve(row, base_url, os.environ["OPENAI_API_KEY"]))


def printed(end: Any) -> float:
    return float(end.last_words)


if __name__ == "__main__":
    main()
