"""The answer of a completion as text. Equal answers of different completions are equal texts.

Majorities count these answers. The extraction is that of the reward, and does not use the right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from millrace.config.tables import task as table
from millrace.environments.extract import Extract
from millrace.environments.program_text import program_of
from millrace.environments.verifiers.mathematics.math_reward import normal_answer

LONGEST = 80
"""The most characters. Of a longer answer, the beginning and a digest are kept."""


def make_answer(config: table.Reward) -> Callable[[str], str]:
    """A function that gives the answer of a completion; empty: there is none. With a judge or a user's
    reward function the answer is the whole completion. A sum has the answer of its first member."""
    match config:
        case table.SumRewardSection():
            return make_answer(config.members[0].reward)
        case table.MathRewardSection():
            return lambda completion: shortened(normal_answer(completion))
        case table.GymRewardSection() | table.ExactRewardSection() | table.JsonRewardSection():
            extract = Extract(config.extract)
        case table.CodeRewardSection():
            return lambda completion: shortened(program_of(completion, config.function).strip())
        case table.PatternRewardSection() | table.JudgeRewardSection() | table.FunctionRewardSection():
            extract = Extract(None)
    return lambda completion: shortened(extract(completion) or "")


def shortened(answer: str) -> str:
    if len(answer) <= LONGEST:
        return answer
    return f"{answer[:40]}... {blake2b(answer.encode(errors='replace'), digest_size=8).hexdigest()}"
