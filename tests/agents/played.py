"""An agent as a process, asking the real gateway. A thread answers its calls with texts, as a model would."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.conversations.tokenizer import load_tokenizer
from millrace.episodes.agents.agent_end import AgentEnd
from millrace.episodes.agents.agents import Agents
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call
from millrace.episodes.gateway.local_agents import DIALECTS
from millrace.episodes.gateway.open_sessions import OpenSessions
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.server import GatewayServer
from millrace.episodes.gateway.sessions import Session, closing_reply

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
WAIT_S = 120.0


@dataclass
class Played:
    """`calls` are the agent's requests, in their order."""

    end: AgentEnd
    calls: list[Call]


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
    sessions, faults, calls = OpenSessions(), list[str](), list[Call]()
    server = GatewayServer(sessions, DIALECTS, on_fault=faults.append)
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
    return Played(process.end, calls)


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
