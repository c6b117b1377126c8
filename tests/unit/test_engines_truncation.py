"""Min-p, top-k and top-p keep the tokens that a full sort would keep, to the bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.types import Sampling
from millrace.engines.own.sampler import Truncation

CPU = torch.device("cpu")
SETTINGS = st.builds(
    Sampling,
    max_tokens=st.just(1),
    top_k=st.sampled_from([0, 1, 2, 5, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1 / 3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def by_sorting(logits_NV: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """One row after another, each sorted whole."""
    kept_NV = torch.full_like(logits_NV, -torch.inf)
    for row, (logits_V, sampling) in enumerate(zip(logits_NV, samplings, strict=True)):
        ranked_V, order_V = logits_V.sort(descending=True, stable=True)
        ranked_V[ranked_V < ranked_V[0] + torch.tensor(sampling.min_p).log()] = -torch.inf
        if sampling.top_k:
            ranked_V[sampling.top_k :] = -torch.inf
        probs_V = ranked_V.double().softmax(-1)
        if sampling.top_p < 1:
            ranked_V[probs_V.cumsum(-1) - probs_V >= sampling.top_p] = -torch.inf
        kept_NV[row, order_V] = ranked_V
    return kept_NV


@given(
    vocab=st.sampled_from([1, 2, 7, 64, 700]),
    samplings=st.lists(SETTINGS, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    steps=st.sampled_from([0.5, 2.0, 1000.0]),
    banned=st.booleans(),
)
def test_what_is_kept_is_what_sorting_keeps(
    vocab: int, samplings: list[Sampling], seed: int, steps: float, banned: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_NV = (3 * steps * torch.randn((len(samplings), vocab), generator=generator)).round() / steps
    if banned:
        logits_NV[:, 1:][torch.rand(len(samplings), vocab - 1, generator=generator) < 0.3] = -torch.inf
    kept_NV = Truncation(samplings, CPU)(logits_NV)
    assert torch.equal(kept_NV, by_sorting(logits_NV, samplings))


def test_a_row_without_a_number_does_not_disturb_the_others() -> None:
    logits = torch.tensor([[torch.nan] * 9, list(range(9))])
    settings = Sampling(max_tokens=1, top_k=2, top_p=0.9, min_p=0.01)
    kept = Truncation([settings] * 2, CPU)(logits)
    assert kept[1].isfinite().nonzero().flatten().tolist() == [7, 8]
