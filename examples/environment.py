"""An own environment: where prompts come from, and what a completion is worth. Used by environment.toml.

    millrace try-task examples/environment.toml --set model.path=MODEL --completion "400 + 7"
    millrace train      examples/environment.toml --set model.path=MODEL

Here: write an equation that gives a number. There is no one right answer, so the reward looks at the row
and checks what was written, instead of comparing it with a reference.
"""

from __future__ import annotations

import random
import re

EQUATION = re.compile(r"\s*(\d{1,3})\s*([+-])\s*(\d{1,3})\s*")


# 1. The rows. The same at every call: a group's prompt is a function of its position in the stream, which
#    is how a run resumes without skipping or repeating one. A row that cannot be a prompt is skipped and
#    counted. Every key is a column: `template` in the configuration and the reward can use it.
def rows() -> list[dict[str, object]]:
    rng = random.Random(0)
    return [{"prompt": f"{n} = ", "target": n} for n in rng.sample(range(1, 1000), 500)]


# 2. The reward. `target` is a column of the row: named here, so passed. `answer` is None, since
#    environment.toml says that this task has none.
def reward(completion: str, answer: None, target: int) -> float:
    match = EQUATION.fullmatch(completion)
    if match is None:
        return 0.0
    left, sign, right = match.groups()
    value = int(left) + int(right) if sign == "+" else int(left) - int(right)
    return 1.0 if value == target else 0.1  # a little for an equation at all: something to climb
