"""What a completion answers, as text: equal answers of different completions are equal texts.

For majorities: the same extraction as the reward's own, without a look at what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from millrace.config.tables import task as table
from millrace.environments.rewards import Extract

LONGEST = 80
"""Characters; of a longer answer the beginning and a digest are kept."""


def make_answer(config: table.Reward) -> Callable[[str], str]:
    """The answer in a completion; empty: there is none. Of a function's reward it is the whole completion."""
    match config:
        case table.MathRewardSection():
            return _mathematics()
        case table.GymRewardSection() | table.ExactRewardSection():
            extract = Extract(config.extract)
        case table.FunctionRewardSection():
            extract = Extract(None)
    return lambda completion: shortened(extract(completion) or "")


def shortened(answer: str) -> str:
    if len(answer) <= LONGEST:
        return answer
    return f"{answer[:40]}... {blake2b(answer.encode(errors='replace'), digest_size=8).hexdigest()}"


def _mathematics() -> Callable[[str], str]:
    """What math-verify reads, as it prints it: 1/2 and 0.5 are two answers."""
    import math_verify

    def answer(completion: str) -> str:
        found = math_verify.parse(completion, parsing_timeout=None)
        return shortened(str(found[0]) if found else "")

    return answer
