"""What the proof expects of an engine, and how far from that an engine may be."""

from __future__ import annotations

import copy

import pytest
import torch
from trainer_doubles import CONFIGS, tiny_model

from millrace.engines.vllm.proof import Proof
from millrace.trainer.model import named_weights
from millrace.trainer.publish.publisher import PublishBuffers


def proof_of(family, directory, dtype=torch.float32, **options):
    tiny_model(family, "eager").config.save_pretrained(directory)
    return Proof(str(directory), dtype, tokens_max=100, **options)


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


FP8_MAX = 448.0


def rounded(matrix):
    """To fp8, with a scale for each row."""
    scale = matrix.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (matrix / scale).to(torch.float8_e4m3fn).to(matrix.dtype) * scale


def quantised(model):
    """A copy whose layers compute as a quantised replica's: weights are rounded by row, inputs by token."""
    model = copy.deepcopy(model)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


@torch.inference_mode()
def logprobs_of(model, tokens):
    logprobs = model(torch.tensor(tokens)[None]).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()


@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_proof_lets_rounding_to_fp8_pass_and_finds_a_stale_layer(family, spread, tmp_path):
    """Log-probs of real models are spread out more than those of random ones."""
    proof = proof_of(family, tmp_path, torch.bfloat16, quantised=True)
    served, stale = (tiny_model(family, "eager", seed=seed).bfloat16() for seed in (3, 4))
    mixed = copy.deepcopy(served)
    mixed.model.layers[1].load_state_dict(stale.model.layers[1].state_dict())
    for model in (served, stale, mixed):
        model.model.norm.weight.data *= spread
    expected = proof.expected(PublishBuffers(named_weights(served), torch.bfloat16).fill())

    def distance(model):
        return proof.distance(expected, logprobs_of(quantised(model), proof.tokens))

    assert distance(served) < 0.5
    assert distance(stale) > 1 and distance(mixed) > 1
