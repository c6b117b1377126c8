"""Agents that are threads, and the episodes of one worker that has them."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from millrace.core.completion.columns import token_array
from millrace.core.types import Finish, Observed, ScoreRequest
from millrace.episodes.agents.agent_process import AgentEnd
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.environment import Budgets, Ids
from millrace.episodes.episodes import Episodes
from millrace.episodes.gateway.agent_environment import AgentEnvironment, AgentParts
from millrace.episodes.gateway.calls import Call, ChatTurn, RefusedCall, Reply
from millrace.episodes.gateway.rendering import make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.sessions import Session, closing_reply
from millrace.episodes.snapshots import Snapshots
from millrace.tasks.rows import Row

Ask = Callable[..., Reply]
Program = Callable[[Row, Ask], Any]


class ThreadAgent:
    """An agent that is a thread. Its program asks without HTTP."""

    time_s: float = math.inf

    def __init__(self, program: Program, row: Row) -> None:
        self.session = Session()
        self._end: AgentEnd | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(program, row), daemon=True).start()

    def _run(self, program: Program, row: Row) -> None:
        returned, code = None, 0
        try:
            returned = program(row, self._ask)
        except Exception as error:
            returned, code = str(error), 1
        self._finish(code, returned)

    def _ask(self, *messages: ChatTurn, **fields: Any) -> Reply:
        call = Call(messages=list(messages), **fields)
        settled = threading.Event()
        pending = self.pending = self.session.submit(call, b"")
        if not self.session.watch(pending, settled.set):
            assert settled.wait(60)
        assert pending.outcome is not None
        if isinstance(pending.outcome, RefusedCall):
            self.session.count_refusal(pending.outcome)  # as the server, before the agent reads the answer
            raise pending.outcome
        return pending.outcome

    def _finish(self, code: int | None, returned: Any, signal: str | None = None) -> None:
        if self._over.is_set():
            return
        self._end = AgentEnd(
            exit_code=code, signal=signal, killed=False, last_words=str(returned), dropped_bytes=0,
            directory="", returned=returned, seconds=0.0,
        )  # fmt: skip
        self._over.set()
        self.session.wake()

    def wait(self, timeout_s: float) -> AgentEnd | None:
        self._over.wait(timeout_s)
        return self._end

    def tests(self) -> None:
        return None

    def conclude(self) -> None:
        self.session.conclude(closing_reply())

    def kill(self) -> None:
        self._finish(None, None, "SIGKILL")

    def close(self) -> None:
        self.session.end()


class ThreadAgents:
    def __init__(self, program: Program) -> None:
        self.program, self.running = program, list[ThreadAgent]()

    def start(self, row: Row) -> ThreadAgent:
        self.running.append(ThreadAgent(self.program, row))
        return self.running[-1]


class Worker:
    """The episodes of one worker, and what the controller has recorded of one trajectory."""

    def __init__(self, tokenizer: Any, program: Program, *, turns: int = 8, timeout_s: float = 60.0) -> None:
        self.tokenizer, self.agents = tokenizer, ThreadAgents(program)
        self.running = self.agents.running
        rendering = make_rendering(tokenizer, {})
        parts = AgentParts(
            self.agents,
            rendering,
            Replies(tokenizer, end_ids={tokenizer.eos_token_id}, stop=("|",)),
            lambda end, row: {"right": float(end.end.returned == row["answer"]), "said": len(end.replies)},
            timeout_s=timeout_s,
            end_s=60.0,
            max_tokens=100,
            stop=("|",),
            num_tokens=len(tokenizer),
        )
        self.made = lambda: AgentEnvironment(parts)
        self.made.wants_ids = True  # type: ignore[attr-defined]
        self.row = {"prompt": "begin", "answer": "yes"}
        self.episodes = self.restarted(turns)

    def restarted(self, turns: int = 8) -> Episodes:
        return Episodes(
            self.made,
            name="agent",
            file=None,
            bridge=PlainBridge(self.tokenizer),
            decode=self.tokenizer.decode,
            budgets=Budgets(turns),
            snapshots=Snapshots(None, 0),
            timeout_s=10.0,
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def begin(self) -> ScoreRequest:
        request = ScoreRequest(4, 1, token_array(), Finish.TURN, [], 500)
        prompt = self.episodes.first(self.row, request)
        assert isinstance(prompt, Ids), prompt
        return replace(request, prompt=token_array(prompt))

    def say(self, request: ScoreRequest, text: str, finish: Finish = Finish.TURN) -> ScoreRequest:
        return self._longer(request, self.ids(text), True, finish)

    def observe(self, request: ScoreRequest, answer: Any) -> ScoreRequest:
        assert isinstance(answer, Observed) and answer.after is None, answer
        return self._longer(request, list(answer.tokens), False, Finish.TURN)

    def _longer(self, request: ScoreRequest, ids: list[int], sampled: bool, finish: Finish) -> ScoreRequest:
        tokens = token_array([*request.tokens, *ids])
        turns = [*request.turns, (len(request.tokens), len(tokens), sampled)]
        return replace(
            request, tokens=tokens, turns=turns, finish=finish, logprobs=array("f", [-1.0] * len(tokens))
        )
