"""The pass rate of a row: of its samples by a model, how many are correct, and the band of its difficulty."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.estimates.interval import Interval, of_attempts
from millrace_curation.candidate import Dropped, Reason

HARD_TO, EASY_FROM = 0.25, 0.75
BANDS = ("too hard", "hard", "medium", "easy", "too easy")


@dataclass(frozen=True, slots=True)
class PassRate:
    """Of the scored samples, `correct` have at least the reward that counts as correct. Samples without a
    reward are in `unscored`, and in no rate."""

    correct: int
    scored: int
    unscored: int
    truncated: int
    reward_mean: float | None

    @property
    def rate(self) -> float | None:
        return self.correct / self.scored if self.scored else None

    @property
    def interval(self) -> Interval:
        return of_attempts(self.correct, self.scored)

    @property
    def band(self) -> str:
        """One of `BANDS`; empty: no sample has a reward."""
        rate = self.rate
        if rate is None:
            return ""
        if rate in (0.0, 1.0):
            return BANDS[0] if rate == 0.0 else BANDS[-1]
        return BANDS[1] if rate <= HARD_TO else BANDS[3] if rate >= EASY_FROM else BANDS[2]


def judge_difficulty(rate: PassRate, *, keep_hard: bool, keep_easy: bool) -> Dropped | None:
    """A row that a group learns nothing from: none of its samples is correct, or all are. Such groups have no
    advantage (DAPO, arXiv:2503.14476, section 3.2)."""
    if not rate.scored:
        return Dropped(Reason.UNSCORED, f"none of {rate.unscored} samples has a reward")
    detail = f"{rate.correct} of {rate.scored} samples are correct"
    if rate.correct == 0 and not keep_hard:
        return Dropped(Reason.TOO_HARD, detail)
    if rate.correct == rate.scored and not keep_easy:
        return Dropped(Reason.TOO_EASY, detail)
    return None
