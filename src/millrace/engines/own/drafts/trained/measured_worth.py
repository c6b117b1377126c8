"""Whether drafts pay, by the share of right tokens and by measured seconds. No token depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.engines.own.drafts.worth import Worth

FIRST = 8  # steps with and without drafts that are measured before they are compared
WINDOW = 64  # steps: what is older counts half, then a quarter
EVERY, TRIAL = 256, 4
"""Of so many steps so many are of the kind that is slower now, to measure it again."""


@dataclass
class _Pace:
    """Of steps of one kind."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.seconds, self.tokens, self.steps = self.seconds + seconds, self.tokens + tokens, self.steps + 1
        if self.steps > WINDOW:
            self.seconds, self.tokens, self.steps = self.seconds / 2, self.tokens / 2, self.steps / 2

    @property
    def token_s(self) -> float:
        return self.seconds / max(self.tokens, 1.0)


class MeasuredWorth(Worth):
    """A `Worth` that compares the seconds per token of steps with and without drafts as well. The time of a
    step depends on its rows, so each number of rows, in powers of 2, is measured apart.

    rows   of the step to come; the engine sets it
    tried  the step had time for drafts, whether or not there were any
    """

    rows, tried = 1, False

    def __init__(self, right: float = 8.0, drafted: float = 16.0) -> None:
        super().__init__(right, drafted)
        self._paces: dict[int, tuple[_Pace, _Pace]] = {}  # without and with drafts
        self._steps: dict[int, int] = {}

    def tries(self) -> bool:
        self.tried = self.is_faster() and super().tries()
        return self.tried

    def is_faster(self) -> bool:
        """Whether the step to come should have drafts, as far as seconds say."""
        without, drafting = self._of_rows()
        if min(without.steps, drafting.steps) < FIRST:
            return without.steps >= FIRST
        trial = self._steps[self.rows.bit_length()] % EVERY < TRIAL
        return (drafting.token_s < without.token_s) != trial

    def measured(self, tokens: int, seconds: float) -> None:
        """A step of `rows` rows has sampled `tokens`."""
        self._of_rows()[self.tried].note(tokens, seconds)
        self._steps[self.rows.bit_length()] = self._steps.get(self.rows.bit_length(), 0) + 1

    def _of_rows(self) -> tuple[_Pace, _Pace]:
        return self._paces.setdefault(self.rows.bit_length(), (_Pace(), _Pace()))
