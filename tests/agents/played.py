"""An agent as a process, asking the real gateway. A thread answers its calls with texts, as a model would."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from millrace.conversations.tokenizer import load_tokenizer
from millrace.episodes.agents.agent_process import AgentEnd
from millrace.episodes.agents.agents import Agents
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call
from millrace.episodes.gateway.dialects.dialect import GatewayDialect
from millrace.episodes.gateway.local_agents import DIALECTS
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, Session, closing_reply

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
REQUESTS = Path(__file__).parent / "requests"
WAIT_S = 120.0


@dataclass
class Played:
    """`calls` are the agent's requests, in their order. `bodies`: with their paths, as they came."""

    end: AgentEnd
    calls: list[Call]
    bodies: list[tuple[str, bytes]]


class _Kept:
    """A dialect that keeps what it reads."""

    def __init__(self, path: str, bodies: list[tuple[str, bytes]]) -> None:
        self._path, self._dialect, self._bodies = path, DIALECTS[path], bodies

    def read(self, body: bytes) -> Call:
        self._bodies.append((self._path, body))
        return self._dialect.read(body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)


def record(request: tuple[str, bytes], name: str, package: str) -> None:
    """With RECORD_REQUESTS=1: keep the request as a file, which tests without the package read. The kernel of
    this machine is left out."""
    if os.environ.get("RECORD_REQUESTS") == "1":
        path, body = request
        text = body.decode().replace(platform.release(), "RELEASE").replace(platform.version(), "VERSION")
        recorded = {"sdk": f"{package} {version(package)}", "path": path, "body": json.loads(text)}
        (REQUESTS / f"{name}.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


def play(
    agent: str,
    directory: Path,
    model: Path,
    texts: Sequence[str],
    row: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> Played:
    """Run the example `agent` to its end. Each call gets the next text. A call too many gets a closing reply.

    Raises: AssertionError: the agent does not end, or fails; the gateway has a bug.
    """
    sessions, faults, calls, bodies = OpenSessions(), list[str](), list[Call](), list[tuple[str, bytes]]()
    dialects = {path: cast(GatewayDialect, _Kept(path, bodies)) for path in DIALECTS}
    server = GatewayServer(sessions, dialects, on_fault=faults.append)
    server.start()
    session = sessions.open()
    thread = threading.Thread(target=_answer, args=(session, load_tokenizer(model), list(texts), calls))
    thread.start()
    try:
        function = f"{EXAMPLES / agent}.py:solve"
        with Agents(directory / "agents", function=function, environment=variables) as agents:
            process = agents.start(None, row, base_url=server.url, key=session.key)
            try:
                process.wait(WAIT_S)
                assert process.end is not None, process.last_words
            finally:
                process.close()
    finally:
        session.end()
        thread.join(WAIT_S)
        server.close()
    assert not faults and process.end.exit_code == 0, process.end.last_words
    return Played(process.end, calls, bodies)


def _answer(session: Session, tokenizer: Any, texts: list[str], calls: list[Call]) -> None:
    replies = Replies(tokenizer)
    while (pending := session.next_call(WAIT_S)) is not None:
        calls.append(pending.call)
        if len(calls) > len(texts):
            session.conclude(closing_reply())
            return
        ids = [*tokenizer.encode(texts[len(calls) - 1], add_special_tokens=False), tokenizer.eos_token_id]
        prompt_ids = pending.call.prompt if isinstance(pending.call.prompt, list) else []
        turn = SampledTurn(ids=ids, logprobs=[-0.5] * len(ids), finish="stop")
        pending.answer(replies.make(f"r{len(calls)}", pending.call, prompt_ids, turn))
