"""An own reward, for the task in reward.jsonl: write a word backwards. Used by reward.toml.

Try it on a few answers, then train with it (docs/rewards.md has more):

    millrace try-task examples/reward.toml --set model.path=MODEL
    millrace train      examples/reward.toml --set model.path=MODEL
"""

from __future__ import annotations


def reward(completion: str, answer: str, level: str) -> dict[str, float] | None:
    """The share of letters in the right place; 1 for the whole word.

    `completion` is what the model wrote, without special tokens. `answer` is the reference, from the
    column that `task.answer` names. Every other parameter is a column of the row: name those you need,
    or take all of them with `**columns`.
    """
    written = completion.strip()
    if level == "unclear":
        return None  # no opinion: the trajectory is left out, and does not count as a bad one

    right = sum(ours == theirs for ours, theirs in zip(written, answer, strict=False))
    share = right / max(len(written), len(answer))  # writing more than the word does not pay

    # A number would do: `return share`. With a dict, the other keys become metrics of the run.
    # Whatever raises here, or takes too long, fails its trajectory with the reason: never a zero.
    return {"reward": share, "exact": float(written == answer), "letters": float(len(written))}
