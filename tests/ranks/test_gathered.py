"""Ranks gather weights in the format of the matmuls, and compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.together import together
from tests.ranks.work import BF16, BUDGET, batch_of, flat, gradient, meet, trainer_of

from millrace.trainer.model import rounded_weights, row_logprobs
from millrace.trainer.ranks.mesh import ALONE
from millrace.trainer.trainer import PolicyTrainer

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 67}
IN_BF16: dict[str, Any] = {"dtype": BF16, "published": BF16}


def logprobs(trainer: PolicyTrainer) -> torch.Tensor:
    """Of a row that every process computes."""
    row = trainer._prepared(batch_of(), 1).rows[0][0]
    assert len(row.tokens_T) <= BUDGET
    with trainer._serving(), torch.no_grad():
        return row_logprobs(trainer.model, row, temperature=1.0, dtype=BF16)[0]


def in_bfloat16(rank: int, rendezvous: str, path: Path) -> dict[str, Any]:
    (ranks,) = meet(rank, rendezvous, [{"shard": 2}])
    one, several = (trainer_of(path, each, **IN_BF16) for each in (ALONE, ranks))
    rounded = rounded_weights(several.model, published=BF16, computing=BF16)
    due, summed = gradient(one, batch_of()), gradient(several, batch_of())
    return {
        "logprobs": [logprobs(trainer).numpy() for trainer in (one, several)],
        "rounded": sorted(name for name in rounded if ".layers." in name),
        "masters": {weight.dtype for weight in several.trained},
        "gradients": {weight.grad.dtype for weight in several.trained},
        "error": float((summed - due).norm() / due.norm()),
        "weights": flat(several.trained).equal(flat(one.trained)),
    }


@pytest.fixture(scope="module", params=["qwen3", "llama"])  # embeddings tied, not tied
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    from trainer_doubles import save_tiny_model

    path = save_tiny_model(tmp_path_factory.mktemp("model"), request.param, **HEADS)
    return together(2, in_bfloat16, path)


def test_log_probs_are_those_of_one_process_bit_for_bit(found: list[Any]) -> None:
    for result in found:
        one, several = result["logprobs"]
        assert (one == several).all()


def test_gathering_rounds_the_layers_so_that_no_copy_of_their_masters_is_needed(found: list[Any]) -> None:
    assert all(not result["rounded"] and result["weights"] for result in found)


def test_masters_gradients_and_their_sums_are_float32(found: list[Any]) -> None:
    for result in found:
        assert result["masters"] == result["gradients"] == {torch.float32}
        assert result["error"] < 5e-3
