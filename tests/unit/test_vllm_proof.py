"""What the proof expects of an engine, and how far from that an engine may be."""

from __future__ import annotations

import pytest
import torch
from trainer_doubles import CONFIGS, tiny_model

from millrace.engines.vllm.proof import Proof
from millrace.trainer.model import named_weights
from millrace.trainer.publish.publisher import PublishBuffers


def proof_of(family, directory, dtype=torch.float32):
    tiny_model(family, "eager").config.save_pretrained(directory)
    return Proof(str(directory), dtype, tokens_max=100)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_plain_model_without_weights_gives_the_log_probs_of_the_published_weights(family, tmp_path):
    proof, model = proof_of(family, tmp_path), tiny_model(family, "eager", seed=3)
    expected = proof.expected(PublishBuffers(named_weights(model), torch.float32).fill())
    tokens = torch.tensor(proof.tokens)
    with torch.inference_mode():
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(expected, logprobs.gather(1, tokens[1:, None])[:, 0], atol=1e-5, rtol=0)


def test_rounding_may_do_more_where_log_probs_are_spread_out(tmp_path):
    proof = proof_of("qwen3", tmp_path, torch.bfloat16)
    alike, spread = torch.linspace(-5, -4, 31), torch.linspace(-12, -1, 31)
    assert proof.distance(alike, (alike + 0.2).tolist()) == pytest.approx(2.0, rel=1e-3)
    assert proof.distance(spread, (spread + 0.2).tolist()) < 1
    assert proof.distance(spread, (spread + 0.4).tolist()) > 1
    assert proof.distance(spread, [float("nan")] * 31) > 1
    assert proof.distance(spread * torch.nan, spread.tolist()) == 0
