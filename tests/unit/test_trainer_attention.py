from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.long import covering
from trainer_doubles import CONFIGS, VOCAB, sequence_logprobs, tiny_model

from millrace.trainer import row_attention
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.model import row_logprobs

ONE_CALL, MANY_CALLS = 10**9, 0


def make_trees(seed=0, alphabet=VOCAB):
    """A small `alphabet` makes completions that begin alike."""
    random = np.random.default_rng(seed)
    trees, first = [], 0
    for _ in range(4):
        branches = []
        for _ in range(int(random.integers(1, 6))):
            tokens = random.integers(0, alphabet, int(random.integers(1, 30))).tolist()
            branches.append(Branch(tokens, np.ones(len(tokens), bool), first))
            first += len(tokens)
        trees.append(Tree(random.integers(0, VOCAB, int(random.integers(1, 20))).tolist(), branches))
    return trees


def packed_logprobs(model, trees, budget, temperature=1.0):
    out = torch.zeros(sum(len(b.tokens) for tree in trees for b in tree.branches))
    for row in pack(trees, budget):
        logprobs, _ = row_logprobs(model, row, temperature=temperature, dtype=torch.float32)
        out = out.index_copy(0, torch.from_numpy(row.flat_N), logprobs)
    return out


def plain_logprobs(model, trees, temperature=1.0):
    return torch.cat(
        [sequence_logprobs(model, t.prompt, b.tokens, temperature) for t in trees for b in t.branches]
    )


def gradients(model, values):
    weights = torch.linspace(-1, 1, len(values))
    model.zero_grad()
    (values * weights).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("family", "alphabet", "calls"),
    covering(sorted(CONFIGS), [VOCAB, 2], [(4096, ONE_CALL), (4096, MANY_CALLS), (60, ONE_CALL)]),
)
def test_packed_logprobs_and_gradients_equal_one_forward_per_sequence(family, alphabet, calls, monkeypatch):
    budget, overhead = calls
    monkeypatch.setattr(row_attention, "CALL_OVERHEAD", overhead)
    packed, plain, trees = tiny_model(family), tiny_model(family, "eager"), make_trees(alphabet=alphabet)
    ours, theirs = packed_logprobs(packed, trees, budget, 0.7), plain_logprobs(plain, trees, 0.7)
    assert theirs.std() > 0.1  # not a uniform distribution that would hide errors
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    expected = gradients(plain, theirs)
    assert (gradients(packed, ours) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_completion_does_not_see_its_siblings():
    model, trees = tiny_model(), make_trees()
    before = packed_logprobs(model, trees, 4096)
    sibling = next(tree.branches[1] for tree in trees if len(tree.branches) > 1)
    sibling.tokens[:] = [(token + 1) % VOCAB for token in sibling.tokens]
    changed = packed_logprobs(model, trees, 4096) != before
    own = range(sibling.first_index, sibling.first_index + len(sibling.tokens))
    assert changed.any()
    assert set(changed.nonzero()[:, 0].tolist()) <= set(own)


def test_short_stretches_share_a_call_and_long_ones_are_not_padded_to_them():
    segments = pack([Tree([1] * 4, [Branch([2] * n, np.ones(n, bool), 0)]) for n in (2000, 9, 8, 7)], 9999)[
        0
    ].segments
    blocks = row_attention.plan(segments, torch.device("cpu")).blocks
    assert [tuple(block.queries_RQ.shape) for block in blocks] == [(1, 2003), (3, 12)]
