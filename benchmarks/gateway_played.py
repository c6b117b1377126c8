"""The gateway of a reward worker in this process, with agents that run and a model that answers at once."""

from __future__ import annotations

import math
import string
import threading
from dataclasses import dataclass, field
from pathlib import Path

import gateway_agents
import msgspec

from millrace.config.tables.reward_kinds import AgentSection
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.types import Finish
from millrace.episodes.agents.agent_process import AgentEnd
from millrace.episodes.environment import Done, SampledTurn
from millrace.episodes.gateway.agent_environment import AgentEnvironment, AgentParts, RunningAgent
from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.local_agents import DIALECTS, LocalAgents
from millrace.episodes.gateway.rendering import make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.sessions import Session, call_name, closing_reply
from millrace.tasks.rows import Row

PROMPT, ANSWER = "What is to be done with this text? " * 8, "The text is to be read, and then kept."
TIMEOUT_S = 300.0
CHAT = "/v1/chat/completions"


@dataclass
class Played:
    """`parts`: of each environment. `said`: the turn that the model always samples."""

    parts: AgentParts
    said: SampledTurn

    def begun(self, calls: int) -> AgentEnvironment:
        """An episode whose agent runs, and waits with an open call."""
        environment = AgentEnvironment(self.parts)
        environment.reset({"prompt": PROMPT, "calls": calls})
        return environment

    def play(self, calls: int) -> list[float]:
        """One episode. Returns what its agent measured."""
        environment = self.begun(calls)
        try:
            for _ in range(calls - 1):
                assert not isinstance(environment.step(self.said), Done)
            return self.end(environment)
        finally:
            environment.close()

    def end(self, environment: AgentEnvironment) -> list[float]:
        """Answer the last call. Returns what the agent measured."""
        done = environment.step(self.said)
        assert isinstance(done, Done) and isinstance(done.reward, dict)
        return list(done.reward.values())


def make_played(directory: Path) -> tuple[Played, Played]:
    """With agents that ask by HTTP, and with agents that ask without. Both are in this process."""
    make_character_tokenizer(directory / "model", string.ascii_letters + " .,?")
    tokenizer = load_tokenizer(directory / "model")
    rendering = make_rendering(tokenizer, {})
    config = AgentSection(function=f"{gateway_agents.__file__}:solve")
    ids = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    both = [
        AgentParts(
            agents,
            rendering,
            Replies(tokenizer, rendering.style),
            lambda end, row: {f"call_{number}": one for number, one in enumerate(end.end.returned)},
            timeout_s=TIMEOUT_S,
            end_s=1.0,
            max_tokens=1_000,
            stop=(),
            num_tokens=len(tokenizer),
        )
        for agents in (LocalAgents(config, rendering, directory / "agents"), DirectAgents())
    ]
    by_http, direct = (Played(one, SampledTurn(ids, [-1.0] * len(ids), Finish.TURN)) for one in both)
    return by_http, direct


@dataclass
class DirectAgent:
    """The same agent as a thread. The dialect reads and writes its calls, and no HTTP carries them."""

    row: Row
    session: Session = field(default_factory=Session)
    ended: threading.Event = field(default_factory=threading.Event)
    returned: list[float] = field(default_factory=list)
    time_s: float = math.inf

    def run(self) -> None:
        self.returned = gateway_agents.converse(self.row["prompt"], self.row["calls"], self._complete)
        self.ended.set()
        self.session.wake()

    def _complete(self, body: bytes) -> bytes:
        call = DIALECTS[CHAT].read(body)
        settled = threading.Event()
        pending = self.session.submit(call, call_name(CHAT, body))
        if not self.session.watch(pending, settled.set):
            assert settled.wait(TIMEOUT_S)
        self.session.leave(pending, settled.set, delivered=True)
        assert pending.outcome is not None and not isinstance(pending.outcome, RefusedCall), pending.outcome
        return msgspec.json.encode(DIALECTS[CHAT].reply(call, pending.outcome))

    def wait(self, timeout_s: float) -> AgentEnd | None:
        if not self.ended.wait(timeout_s):
            return None
        return AgentEnd(
            exit_code=0,
            signal=None,
            killed=False,
            last_words="",
            dropped_bytes=0,
            directory="",
            returned=self.returned,
            seconds=0.0,
        )

    def tests(self) -> None: ...

    def conclude(self) -> None:
        self.session.conclude(closing_reply())

    def kill(self) -> None: ...

    def close(self) -> None:
        self.session.end()


class DirectAgents:
    def start(self, row: Row) -> RunningAgent:
        agent = DirectAgent(row)
        threading.Thread(target=agent.run, daemon=True).start()
        return agent
