"""What attempts say of a row: the gold check, and its pass rate. In the gold check the run's own reward
gives a row's reference answer the full score, and others less. The pass rate says how many of a model's
samples are correct, and has bands of difficulty.

A wrong answer is the reference answer of another row, an empty text, or the prompt. The answer of another
row may be right in another notation (1/2 and 0.5). So all `OTHERS` must have the full score to drop a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.rounding import reaches
from millrace.estimates.interval import Interval, of_attempts
from millrace_curation.candidate import CandidateRow, Dropped, Reason
from millrace_curation.words import normalized

OTHERS = 2
GOLD, EMPTY, PROMPT = "the reference answer", "an empty text", "the prompt"
OTHER = tuple(f"the answer of another row ({number})" for number in range(1, OTHERS + 1))
KINDS = (GOLD, EMPTY, PROMPT, *OTHER)
"""The attempts at a row, by their number."""
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class GoldScore:
    """The reward of one attempt; None: there is none, for `reason`. `seen`: the text that the reward got."""

    reward: float | None
    reason: str = ""
    seen: str = ""


def check_template(template: str) -> None:
    """Raises: ConfigError: the template of reference answers has no `{answer}`, or other fields."""
    try:
        filled = "\0" in template.format(answer="\0")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"`--gold-template` {template!r} cannot be filled: {type(error).__name__}: {error}"
        ) from None
    if not filled:
        raise ConfigError(f"`--gold-template` {template!r} has no {{answer}}: say where the answer goes")


def attempts_at(rows: Sequence[CandidateRow], template: str) -> list[list[str | None]]:
    """For each row a text for each of `KINDS`; None where the rows have no other answer."""
    answers = {normalized(row.answer or ""): row.answer or "" for row in rows}
    distinct = sorted(answers)
    place = {answer: number for number, answer in enumerate(distinct)}

    def other(row: CandidateRow, step: int) -> str | None:
        if step >= len(distinct):
            return None
        number = place[normalized(row.answer or "")]
        return template.format(answer=answers[distinct[(number + step) % len(distinct)]])

    return [
        [template.format(answer=row.answer), "", row.text, *(other(row, 1 + step) for step in range(OTHERS))]
        for row in rows
    ]


def judge_gold(scores: Mapping[str, GoldScore], correct_at: float) -> Dropped | None:
    """What is wrong with a row by the scores of its attempts, by kind; None: nothing."""
    gold = scores[GOLD]
    if gold.reward is None:
        return Dropped(Reason.GOLD_REFUSED, f"it has no reward: {gold.reason}")
    if not reaches(gold.reward, correct_at):
        seen = repr(gold.seen[:SHOWN_CHARACTERS])
        return Dropped(Reason.GOLD_REFUSED, f"it gets {gold.reward:g}, less than {correct_at:g}: {seen}")

    def accepted(kind: str) -> bool:
        score = scores.get(kind)
        return score is not None and score.reward is not None and reaches(score.reward, correct_at)

    others = [kind for kind in OTHER if kind in scores]
    if others and all(accepted(kind) for kind in others):
        seen = repr(scores[others[0]].seen[:SHOWN_CHARACTERS])
        return Dropped(Reason.WRONG_ACCEPTED, f"the answer of another row has the full score: {seen}")
    for kind in (EMPTY, PROMPT):
        if accepted(kind):
            return Dropped(Reason.WRONG_ACCEPTED, f"{kind} has the full score")
    return None


# ---------------------------------------------------------------- pass rates


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
