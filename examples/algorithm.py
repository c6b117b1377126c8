"""An algorithm of your own: an advantage, an objective, a normalisation. Nothing else.

    python examples/algorithm.py
    millrace train CONFIG --set algorithm.kind=function --set algorithm.path=examples/algorithm.py:CISPO

The example is CISPO (arXiv:2506.13585, equation 4): REINFORCE with a truncated importance weight,
here with a leave-one-out baseline. You write two pure functions; the trainer masks, weights, packs,
reduces and clips, so you cannot get a gradient that depends on the micro-batch.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.algorithms.advantages import leave_one_out_advantages
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.model import load_model, row_logprobs
from millrace.trainer.trainer import PolicyTrainer

CAP = 2.0


# 1. The objective: one loss per token. `xp` is torch here and could be jax.numpy. The gradient of what you
#    return is the gradient of the algorithm. `fixed_N` is the current log-prob as a constant: use it
#    wherever the paper writes sg[...] or `detach`. What a whole sequence has in common comes from
#    `logprobs.sequences.mean(...)` and `.total(...)`: nothing else may combine tokens.
def cispo_objective(xp, logprobs: TokenLogprobs, advantages_N):
    weight_N = xp.clip(xp.exp(logprobs.fixed_N - logprobs.behavior_N), 0.0, CAP)
    return -weight_N * advantages_N * logprobs.current_N


# 2. The algorithm: `advantages` maps a `ComparedGroup` (rewards, lengths, which are truncated) to its
#    advantages; `normalize` says what a token counts for ("token": every token of the batch the same).
CISPO = Algorithm(
    advantages=leave_one_out_advantages,
    objective=cispo_objective,
    normalize="token",
    weight_cap=CAP,
    needs_reference=False,
)


def make_model(directory: Path) -> Path:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_batch(version: int) -> Batch:
    """Four groups of four: what the controller hands to a trainer. Token 7 is what the reward likes."""
    random = np.random.default_rng(version)
    groups = []
    for group_id in range(4):
        sequences = []
        for member in range(4):
            tokens = random.integers(0, 16, 8).tolist()
            sequences.append(
                TrainSequence(
                    trajectory_id=group_id * 4 + member,
                    columns=TokenColumns.of(tokens, [-float(np.log(16))] * 8, version),  # drawn uniformly
                    reward=tokens.count(7) / 8,
                    truncated=False,
                )
            )
        groups.append(TrainGroup(group_id, [1, 2, 3], sequences))
    return Batch(version, groups)


def probability_of_7(model) -> float:
    (row,) = pack([Tree([1, 2, 3], [Branch([7], np.array([True]), 0)])], token_budget=16)
    with torch.no_grad():
        logprobs_N, _ = row_logprobs(model, row, temperature=1.0, dtype=torch.float32)
    return logprobs_N.exp().item()


def main(steps: int = 10) -> list[float]:
    """Returns the probability of the liked token, before the first step and after each."""
    with TemporaryDirectory() as directory:
        model = load_model(make_model(Path(directory)), torch.device("cpu"))
        settings = StepSettings(
            optimizer=Optimizer(lr=3e-3),
            token_budget=4096,
            max_tokens=8,
            temperature=1.0,
            dtype=torch.float32,
            published=torch.float32,
        )
        trainer = PolicyTrainer(model, CISPO, settings)
        found = [probability_of_7(model)]
        for version in range(steps):
            trainer.step(make_batch(version), rejected_dir=Path(directory))
            found.append(probability_of_7(model))
    return found


if __name__ == "__main__":
    print("probability of token 7:", " ".join(f"{probability:.3f}" for probability in main()))
