"""The continuation of a trajectory by one engine."""

from __future__ import annotations

import math
from collections.abc import Callable

from millrace.core.completion.columns import LOGPROB_MAX, TokenColumns
from millrace.core.completion.routing import Routing
from millrace.core.completion.top_logprobs import Row
from millrace.core.errors import WorkerError
from millrace.core.turns.stop_strings import StopStrings
from millrace.core.types import Finish, Progress, Work


class Continuation:
    """The tokens so far, the tokens that this engine sampled, and how many of them were reported."""

    def __init__(
        self,
        work: Work,
        *,
        eos_ids: frozenset[int],
        max_sequence_tokens: int,
        decode: Callable[[list[int]], str] | None,
        vocab: int,
        engine: str,
    ) -> None:
        self.work, self._vocab, self._engine = work, vocab, engine
        self.tokens = [*work.prompt, *work.tokens]
        self.finish: Finish | None = None
        self.prefix_key: tuple = (work.group_id, tuple(work.prompt))
        self._sampled, self._reported = TokenColumns(), 0
        sampling = work.sampling
        self.stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        self._budget = min(len(work.prompt) + sampling.max_tokens, max_sequence_tokens)
        self._stop_strings = StopStrings(decode, sampling.stop) if sampling.stop and decode else None
        self._note_finish()

    @property
    def completion_length(self) -> int:
        return len(self.tokens) - len(self.work.prompt)

    @property
    def turns(self) -> tuple[list[int], list[int]]:
        """What precedes the present turn, and the tokens that were sampled in it."""
        start = len(self.work.prompt) + self.work.turn_start
        return self.tokens[:start], self.tokens[start:]

    @property
    def tokens_left(self) -> int:
        """Tokens of the budget that are left."""
        return self._budget - len(self.tokens)

    @property
    def has_sampled(self) -> bool:
        """Whether this engine has sampled a token."""
        return len(self._sampled) > 0

    def append(
        self,
        token: int,
        logprob: float,
        version: int,
        top_logprobs: Row | None = None,
        token_masks: bytes | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Append a sampled token. `top_logprobs`: as many as `sampling.logprobs`, or more.

        Raises: WorkerError: no engine can have sampled this token with this log-prob."""
        if not (0 <= token < self._vocab and -math.inf < logprob <= LOGPROB_MAX):
            raise WorkerError(
                f"{self._engine} gives token {token} with log-prob {logprob} to trajectory "
                f"{self.work.trajectory_id}: ids are from 0 to {self._vocab - 1}, and log-probs finite and "
                "at most 0\n  The token is not recorded. Does the engine serve another model?"
            )
        logprob = min(logprob, 0.0)  # a rounded log-prob can be above 0
        if top_logprobs is not None:
            num = self.work.sampling.logprobs
            top_logprobs = (top_logprobs[0][:num], top_logprobs[1][:num]) if num else None
        self.tokens.append(token)
        self._sampled.append(token, logprob, version, top_logprobs, token_masks, routing)
        self._note_finish()

    def unreported(self) -> list[Progress]:
        """Progress since the last call, with the finish. Empty without new tokens and without a finish."""
        since, self._reported = self._reported, len(self._sampled)
        return [self._progress(since)] if self._reported > since or self.finish is not None else []

    def sampled(self) -> Progress:
        """All tokens that this engine sampled."""
        return self._progress(0)

    def _progress(self, since: int) -> Progress:
        return Progress(
            trajectory_id=self.work.trajectory_id,
            lease=self.work.lease,
            start=len(self.work.tokens) + since,
            columns=self._sampled[since:],
            finish=self.finish,
        )

    def _note_finish(self) -> None:
        """Set `finish`, also for work that arrives complete."""
        if self.completion_length > self.work.turn_start and self._stops():
            self.finish = Finish.STOP
        elif len(self.tokens) >= self._budget:
            self.finish = Finish.LENGTH

    def _stops(self) -> bool:
        if self.tokens[-1] in self.stop_ids:
            return True
        if self._stop_strings is None:
            return False
        return self._stop_strings.hit(self.turns[1])
