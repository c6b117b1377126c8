"""Log-probs of the same tokens by another program, and where its most likely token is another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from text_parts.completions import Completion


class Difference(NamedTuple):
    """Where greedy tokens first differ. `gap`: between the logits of the two most likely tokens there."""

    completion: int
    position: int
    gap: float


class Transformers:
    """The model as transformers computes it: each completion whole, in one pass, in float32."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(self, completion: Completion) -> Any:
        """(tokens of the completion, vocabulary)."""
        import torch

        prompt, tokens = completion.asked.tokens, completion.tokens
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            return self._model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]

    def logprob_gaps(self, completions: Sequence[Completion]) -> np.ndarray:
        """|ours - theirs| of every token, in nats."""
        gaps = [np.zeros(0)]
        for completion in completions:
            logits = self.logits(completion) / (completion.temperature or 1.0)
            theirs = logits.log_softmax(-1)[range(len(logits)), completion.tokens]
            gaps.append(np.abs(theirs.numpy() - np.array(completion.logprobs)))
        return np.concatenate(gaps)

    def first_differences(self, completions: Sequence[Completion]) -> list[Difference]:
        """Of greedy completions. Behind equal tokens the most likely one is what `generate` would take."""
        found = []
        for number, completion in enumerate(completions):
            logits = self.logits(completion)
            others = (logits.argmax(-1).numpy() != np.array(completion.tokens)).nonzero()[0]
            if len(others):
                found.append(self._difference(number, int(others[0]), logits))
        return found

    def difference(self, number: int, completion: Completion, position: int) -> Difference:
        """The same for a position at which another program's greedy token was another one."""
        return self._difference(number, position, self.logits(completion))

    def _difference(self, number: int, position: int, logits: Any) -> Difference:
        first, second = logits[position].topk(2).values.tolist()
        return Difference(number, position, first - second)


def gap_figures(gaps: np.ndarray, name: str) -> dict[str, float]:
    return {
        f"{name}_tokens": len(gaps),
        f"{name}_mean": float(gaps.mean()),
        f"{name}_p999": float(np.quantile(gaps, 0.999)),
        f"{name}_max": float(gaps.max()),
    }


def greedy_figures(differences: Sequence[Difference], number: int, name: str) -> dict[str, float]:
    return {
        f"greedy_equal_{name}": (number - len(differences)) / number,
        f"greedy_first_gap_{name}": max((one.gap for one in differences), default=0.0),
    }
