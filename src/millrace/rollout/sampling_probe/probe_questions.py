"""The questions to an engine: for each of a few random prompts, the first token of some trajectories.

A probe's trajectories have negative ids, so no trajectory of a run has their noise or their lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work

PROMPTS, PROMPT_TOKENS = 4, 8
COLD = 0.5
"""A temperature at which a distribution is clearly another than at 1."""


class Question(NamedTuple):
    """`draws`: trajectories of each prompt. Questions with equal `noise` and `seed` have equal noise. The
    questions of one `round` are asked together. `top_k` -1: the size of the vocabulary."""

    name: str
    draws: int
    round: int
    temperature: float = 1.0
    top_k: int = 0
    noise: int = 0
    seed: int = 0


PLAIN = Question("plain", 32, 0)
COLDER = Question("cold", 16, 0, temperature=COLD, noise=1)
GREEDY = Question("greedy", 1, 0, temperature=0.0, noise=2)
AGAIN = Question("again", 12, 1)
OTHER_SEED = Question("other seed", 12, 2, seed=1)
ALL = Question("top_k all", 12, 3, top_k=-1)
TWO = Question("top_k 2", 12, 3, top_k=2, noise=1)

_BLOCK = 1000  # ids of one noise, far more than its trajectories


def questions(*, seeded: bool, cuts: bool) -> list[Question]:
    """Those that an engine can answer. `seeded`: trajectories have noise of their own. `cuts`: it knows
    `sampling.top_k`."""
    return [PLAIN, COLDER, GREEDY, *[AGAIN, OTHER_SEED] * seeded, *[ALL, TWO] * cuts]


_LEASES = count()  # of this process: an engine takes each lease once


def works(question: Question, vocabulary: int) -> Iterator[Work]:
    """The works of a question. They are in the order of prompts, each with its draws."""
    lease = next(_LEASES)
    for prompt, tokens in enumerate(prompts(vocabulary)):
        for draw in range(question.draws):
            sampling = Sampling(
                max_tokens=1,
                temperature=question.temperature,
                top_k=vocabulary if question.top_k < 0 else question.top_k,
                ignore_eos=True,
                token_masks=False,
            )
            yield Work(
                trajectory_id=-1 - (question.noise * _BLOCK + prompt * PLAIN.draws + draw),
                group_id=-1 - prompt,
                lease=lease,
                prompt=token_array(tokens),
                tokens=token_array(),
                sampling=sampling,
                seed=question.seed,
            )


def prompts(vocabulary: int) -> list[list[int]]:
    """Fixed random tokens: what follows them is seldom certain."""
    shape = (PROMPTS, PROMPT_TOKENS)
    drawn: list[list[int]] = np.random.default_rng(0).integers(0, vocabulary, shape).tolist()
    return drawn
