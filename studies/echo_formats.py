"""The task of `echo_chamber.py`: sums of four digits, answered in three formats, and figures of such answers.

    direct   so 17
    words    3 and 5 make 8 then 8 and 7 make 15 then 15 and 2 make 17 so 17
    code     x = 3 x += 5 x += 7 x += 2 print x > so 17

A word or a number is a token. Only `words` has the sums in between.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.estimates.evaluation import pass_at_k

TERMS, DIGIT_MAX = 4, 9
FORMATS = ("direct", "words", "code")
OTHER = "other"
ANSWER = r"so (\d+)"
WORDS = [
    *("<|pad|>", "<|end|>", "+", "=", "so", "and", "make", "then", "x", "+=", "print", ">"),
    *map(str, range(TERMS * DIGIT_MAX + 1)),
]
"""The vocabulary; the place of a word is its token."""

_WHOLE = {
    "direct": re.compile(r"so \d+"),
    "words": re.compile(r"\d+ and \d+ make \d+( then \d+ and \d+ make \d+)* so \d+"),
    "code": re.compile(r"x = \d+( x \+= \d+)+ print x > so \d+"),
}

Terms = tuple[int, ...]
Answer = tuple[str, bool]
"""The format of a completion, and whether its answer is right."""


def problems(num_held_out: int) -> tuple[list[Terms], list[Terms]]:
    """All problems in a fixed random order: those that are held out, and the rest."""
    every = list(itertools.product(range(1, DIGIT_MAX + 1), repeat=TERMS))
    random.Random(0).shuffle(every)
    return every[:num_held_out], every[num_held_out:]


def prompt(terms: Terms) -> str:
    return " + ".join(map(str, terms)) + " ="


def answer(terms: Terms, form: str) -> str:
    """The right answer in this format."""
    if form == "words":
        sums = list(itertools.accumulate(terms))
        steps = [f"{a} and {b} make {c}" for a, b, c in zip(sums, terms[1:], sums[1:], strict=False)]
        return f"{' then '.join(steps)} so {sums[-1]}"
    program = f"x = {terms[0]} {' '.join(f'x += {term}' for term in terms[1:])} print x > "
    return (program if form == "code" else "") + f"so {sum(terms)}"


def demonstrations(rest: Sequence[Terms], mixture: Mapping[str, float], *, num: int, seed: int) -> list[Any]:
    """(prompt, completion) pairs. The format does not depend on the problem."""
    draw = random.Random(seed)
    forms = draw.choices(list(mixture), list(mixture.values()), k=num)
    return [(prompt(terms), answer(terms, form)) for form in forms for terms in [draw.choice(rest)]]


def format_of(completion: str) -> str:
    """The format of the whole completion; `OTHER`: it has none. Its numbers may be wrong."""
    return next((form for form, whole in _WHOLE.items() if whole.fullmatch(completion)), OTHER)


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens if token > 1)


@dataclass(frozen=True)
class Tally:
    """Figures of sampled completions. `accuracy` of a format that was never sampled is None.

    `entropy` is that of the formats in nats, at most ln 3 = 1.10 where all completions have a format.
    """

    num: int
    shares: dict[str, float]
    accuracy: dict[str, float | None]
    pass_1: float
    pass_k: float
    entropy: float

    @classmethod
    def of(cls, rows: Sequence[Sequence[Answer]]) -> Tally:
        """One row for each prompt, all of the same length k."""
        flat = [one for row in rows for one in row]
        right = {form: [ok for f, ok in flat if f == form] for form in (*FORMATS, OTHER)}
        shares = {form: len(each) / len(flat) for form, each in right.items()}
        passes = [[sum(ok for _, ok in row), len(row)] for row in rows]
        return cls(
            num=len(flat),
            shares=shares,
            accuracy={form: sum(each) / len(each) if each else None for form, each in right.items()},
            pass_1=sum(c / n for c, n in passes) / len(rows),
            pass_k=sum(pass_at_k(n, c, n) for c, n in passes) / len(rows),
            entropy=-sum(share * math.log(share) for share in shares.values() if share > 0),
        )


def best(values: Mapping[str, float | None]) -> str:
    """The format with the highest value."""
    return max(FORMATS, key=lambda form: values.get(form) or 0.0)


def tilted(start: Mapping[str, Any], kl: float) -> dict[str, float]:
    """Shares that a KL coefficient allows, from the figures of a start (a `Tally`).

        p'(f) ~ p(f) exp(a(f) / (s kl)),    s = sqrt(a (1 - a))

    p, a: shares and accuracies of the formats, without index of all completions. It is the optimum of
    expected advantage - kl KL(p' || p), if only the format changes and nothing within it. GRPO divides by
    the deviation of a group's rewards, for which s stands. `algorithm.kl_estimator = "k3"` as a loss has the
    gradient of KL(p || p'), whose optimum is near if both are near p.
    """
    scale = kl * math.sqrt(start["pass_1"] * (1 - start["pass_1"]))
    gains = {form: (start["accuracy"][form] or 0.0) / scale if scale else 0.0 for form in FORMATS}
    top = max(gains.values())
    weights = {form: start["shares"][form] * math.exp(gains[form] - top) for form in FORMATS}
    whole = sum(weights.values()) or 1.0
    return {form: weight / whole for form, weight in weights.items()}
