"""A trajectory while an engine works on it."""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.types import Finish, Progress, Work
from millrace.rollout.stop import StopStrings


class Sequence:
    """Tokens so far, under which version each was sampled, and how much of that was reported."""

    def __init__(
        self,
        work: Work,
        *,
        eos_ids: frozenset[int],
        max_sequence_tokens: int,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self.work = work
        self.tokens = [*work.prompt, *work.tokens]
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self.prefix_key = (work.group_id, tuple(work.prompt))
        self._spans: list[tuple[int, int]] = []  # (version, index of its first token in the completion)
        self._reported = len(work.tokens)
        self._stop_ids = eos_ids
        self._budget = min(len(work.prompt) + work.sampling.max_tokens, max_sequence_tokens)
        strings = work.sampling.stop_strings
        self._stop_strings = StopStrings(decode, strings) if strings and decode is not None else None
        self._note_finish()

    @property
    def completion_length(self) -> int:
        return len(self.tokens) - len(self.work.prompt)

    def append(self, token: int, logprob: float, version: int) -> None:
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, self.completion_length))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids or self._stop_strings is not None:
            self._note_finish()
        elif len(self.tokens) >= self._budget:
            self.finish = Finish.LENGTH

    def unreported(self) -> list[Progress]:
        """Progress since the last call, one per version; the last one carries the finish."""
        progress = self._progress(self._reported)
        self._reported = self.completion_length
        return progress

    def sampled(self) -> list[Progress]:
        """Everything sampled here, one per version; one empty progress if that is nothing."""
        start = len(self.work.tokens)
        return self._progress(start) or [self._part(start, start, -1)]

    def _progress(self, since: int) -> list[Progress]:
        ends = [*(start for _, start in self._spans[1:]), self.completion_length]
        parts = [
            self._part(max(start, since), end, version)
            for (version, start), end in zip(self._spans, ends, strict=False)
            if end > since
        ]
        if self.finish is not None and not parts:
            return [self._part(since, since, -1)]
        return parts

    def _part(self, start: int, end: int, version: int) -> Progress:
        prompt, resumed = len(self.work.prompt), len(self.work.tokens)
        return Progress(
            trajectory_id=self.work.trajectory_id,
            lease=self.work.lease,
            start=start,
            tokens=self.tokens[prompt + start : prompt + end],
            logprobs=self.logprobs[start - resumed : end - resumed],
            version=version,
            finish=self.finish if end == self.completion_length else None,
        )

    def _note_finish(self) -> None:
        """Set `finish`, also for work that arrives already complete."""
        if self.completion_length and self._stops():
            self.finish = Finish.STOP
        elif len(self.tokens) >= self._budget:
            self.finish = Finish.LENGTH

    def _stops(self) -> bool:
        if self.tokens[-1] in self._stop_ids:
            return True
        if self._stop_strings is None:
            return False
        return self._stop_strings.hit(self.tokens[len(self.work.prompt) :])
