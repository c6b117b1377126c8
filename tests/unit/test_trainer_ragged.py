"""Rows attended in one call without padding. The kernel is of GPUs: a double computes what it promises."""

from __future__ import annotations

import pytest
import torch
from test_trainer_attention import gradients, make_trees, packed_logprobs, plain_logprobs
from tests.long import covering
from trainer_doubles import CONFIGS, VOCAB, tiny_model

from millrace.core.supported import SINKS
from millrace.trainer import model as trainer_model
from millrace.trainer.kernels import fused_attention

COMPOSED = {
    name
    for name, config in CONFIGS.items()
    if getattr(config, "attn_logit_softcapping", None) or config.model_type in SINKS
}


def varlen_attn(
    query, key, value, query_ends, key_ends, longest_query, longest_key, *, scale, window_size, **more
):
    """What torch's documentation says of its kernel: the mask is aligned at the end of the keys."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(
        query_ends.unfold(0, 2, 1).tolist(), key_ends.unfold(0, 2, 1).tolist(), strict=True
    ):
        assert q1 - q0 <= longest_query and k1 - k0 <= longest_key
        groups = query.shape[1] // key.shape[1]
        k, v = (x[k0:k1].repeat_interleave(groups, 1) for x in (key, value))
        behind = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        seen = behind >= 0
        if window_size[0] >= 0:
            seen &= behind <= window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(fused_attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(fused_attention, "GROUPED", {})
    monkeypatch.setattr(trainer_model, "serves", lambda *_: True)


@pytest.mark.parametrize(("family", "alphabet"), covering(sorted(set(CONFIGS) - COMPOSED), [VOCAB, 2]))
def test_one_call_without_padding_gives_the_logprobs_and_gradients_of_each_sequence(family, alphabet, served):
    packed, plain, trees = tiny_model(family), tiny_model(family, "eager"), make_trees(alphabet=alphabet)
    ours, theirs = packed_logprobs(packed, trees, 4096, 0.7), plain_logprobs(plain, trees, 0.7)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients(packed, ours), gradients(plain, theirs), atol=1e-6, rtol=1e-4)


def test_without_a_prefix_the_keys_are_the_row_itself():
    from millrace.trainer.batch.packing import RowSegment

    own = torch.empty(0, dtype=torch.int64).numpy()
    row = fused_attention.arrange([RowSegment(0, 3, own), RowSegment(3, 2, own)], torch.device("cpu"))
    assert row.keys_K is None and row.key_ends.tolist() == row.query_ends.tolist() == [0, 3, 5]
    assert (row.longest_query, row.longest_key) == (3, 3)


def test_a_cpu_float32_capped_scores_and_sinks_are_not_served():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    qwen = CONFIGS["qwen3"]
    assert not fused_attention.serves(cpu, torch.bfloat16, qwen)
    assert not fused_attention.serves(gpu, torch.float32, qwen)
    for family in COMPOSED:
        assert not fused_attention.serves(gpu, torch.bfloat16, CONFIGS[family])
