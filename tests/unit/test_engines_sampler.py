"""Noise and sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from millrace.core.types import Sampling
from millrace.engines.own.sampler import TokenSampler
from millrace.engines.own.sampling_options import Edits
from millrace.rollout.noise import Noise


def uniforms(seeds: Sequence[int], trajectory_ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    return Noise(seeds, trajectory_ids).uniforms(positions, 1)[:, 0]


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], noise: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs, *_ = sampler(samplings, logits.shape[1])(logits, torch.from_numpy(noise))
    return tokens, logprobs


def sampler(samplings: Sequence[Sampling], vocab: int) -> TokenSampler:
    """Of sequences with the prompt [0] and the completion [1, 1, 2]."""
    cpu = torch.device("cpu")
    edits = Edits(samplings, [([0], [1, 1, 2])] * len(samplings), vocab=vocab, device=cpu)
    return TokenSampler(samplings, cpu, edits if any(sampling.edits for sampling in samplings) else None)


def draw(logits: list[float], sampling: Sampling, count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor(logits).repeat(count, 1)
    noise = uniforms([3] * count, list(range(count)), [0] * count)
    return sample(rows, [sampling] * count, noise)


def test_noise_depends_on_seed_trajectory_and_position_and_on_nothing_else() -> None:
    batch = uniforms([1, 1, 1, 2, 1], [5, 5, 6, 5, 5], [0, 1, 0, 0, 0])
    assert len(set(batch.tolist())) == 4
    assert batch[0] == batch[4] == uniforms([1], [5], [0])[0]


def splitmix(*numbers: int) -> float:
    """The same in plain integers."""
    mask, state = (1 << 64) - 1, 0
    for number in numbers:
        z = ((state ^ (number & mask)) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        state = z ^ (z >> 31)
    return (state >> 12) / 2**52


def test_noise_is_splitmix_of_the_three_numbers_in_turn() -> None:
    cases = [(0, 0, 0), (1, 2, 3), (-1, 2**40, 9), (2**63, 2**64 - 1, 511)]
    assert uniforms(*zip(*cases, strict=True)).tolist() == [splitmix(*case) for case in cases]


def test_noise_of_consecutive_positions_is_that_of_each() -> None:
    seeds, trajectories, starts = [1, 2], [7, 2**40], [0, 300]
    together = Noise(seeds, trajectories).uniforms(starts, 5)
    for step in range(5):
        alone = uniforms(seeds, trajectories, [start + step for start in starts])
        assert together[:, step].tolist() == alone.tolist()


def test_noise_is_uniform_along_every_coordinate() -> None:
    many, same = list(range(20_000)), [4] * 20_000
    for coordinates in ((many, same, same), (same, many, same), (same, same, many)):
        counts = np.histogram(uniforms(*coordinates), bins=20, range=(0, 1))[0]
        chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi_squared < 43.8  # the 99.9 % quantile for 19 degrees of freedom


def test_frequencies_follow_the_distribution_at_the_temperature() -> None:
    logits = [0.0, 1.0, 2.0, -30.0]
    tokens, logprobs = draw(logits, Sampling(max_tokens=1, temperature=2.0))
    expected = (torch.tensor(logits) / 2).softmax(-1)
    frequencies = torch.bincount(tokens, minlength=4) / len(tokens)
    assert (frequencies - expected).abs().max() < 0.025
    assert torch.allclose(logprobs, expected.log()[tokens])


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    tokens, logprobs = draw([1.0, 1.0, 1.0, 0.0], Sampling(max_tokens=1, top_k=2))
    assert set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs, torch.tensor(math.log(0.5)))


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    tokens, logprobs = draw(logits, Sampling(max_tokens=1, top_p=0.7))
    assert set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs.exp(), torch.tensor([0.625, 0.375])[tokens])


def test_top_p_counts_within_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    tokens, _ = draw(logits, Sampling(max_tokens=1, top_k=2, top_p=0.57))
    assert set(tokens.tolist()) == {0}  # 0.4 / 0.7 already reaches 0.57


def test_min_p_keeps_what_is_at_least_that_fraction_of_the_first() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    tokens, logprobs = draw(logits, Sampling(max_tokens=1, min_p=0.29, top_p=0.9))
    assert set(tokens.tolist()) == {0, 1, 2}  # 0.15 / 0.5 is 0.3; top-p counts among these
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3, 0.15])[tokens] / 0.95)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"repetition_penalty": 2.0}, [0.5, 1.0, -2.0, 3.0]),
        ({"presence_penalty": 0.5}, [1.0, 1.5, -1.5, 3.0]),
        ({"frequency_penalty": 0.5}, [1.0, 1.0, -1.5, 3.0]),
        ({"banned_token_ids": (3,)}, [1.0, 2.0, -1.0, -math.inf]),
        ({"allowed_token_ids": (0, 2)}, [1.0, -math.inf, -1.0, -math.inf]),
    ],
)
def test_edits_worked_by_hand(settings: dict, expected: list[float]) -> None:
    tokens, logprobs = draw([1.0, 2.0, -1.0, 3.0], Sampling(max_tokens=1, temperature=0.5, **settings), 500)
    assert torch.allclose(logprobs, (torch.tensor(expected) / 0.5).log_softmax(-1)[tokens])


def test_a_sampled_token_counts_from_then_on() -> None:
    one = sampler([Sampling(max_tokens=1, temperature=0, presence_penalty=2.0)], 4)
    logits, noise = torch.tensor([[0.0, 0.0, 0.0, 1.5]]), torch.zeros(1, dtype=torch.float64)
    assert [int(one(logits, noise)[0]) for _ in range(2)] == [3, 0]


def test_the_likely_tokens_are_those_of_the_edited_and_cut_distribution() -> None:
    settings = Sampling(max_tokens=1, temperature=0.5, top_k=2, banned_token_ids=(3,), logprobs=3)
    logits, noise = torch.tensor([[1.0, 2.0, -1.0, 3.0]]), torch.zeros(1, dtype=torch.float64)
    one = sampler([settings], 4)
    (row,) = one.top_logprobs(one(logits, noise))
    assert row is not None
    assert row[0][:2] == [1, 0]
    expected = torch.tensor([2.0, 1.0]).div(0.5).log_softmax(-1).tolist()
    assert row[1] == pytest.approx([*expected, -math.inf])


def test_greedy_records_the_logprob_at_temperature_1_without_truncation() -> None:
    tokens, logprobs = draw([0.0, 2.0, 2.0], Sampling(max_tokens=1, temperature=0, top_k=1, top_p=0.1), 3)
    assert tokens.tolist() == [1, 1, 1]
    assert torch.allclose(logprobs, torch.tensor([0.0, 2.0, 2.0]).log_softmax(-1)[1])


def test_the_first_and_last_token_are_reached_at_the_ends_of_the_noise() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(2, 1)
    tokens, _ = sample(logits, [Sampling(max_tokens=1)] * 2, np.array([0.0, 1 - 2.0**-52]))
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [3, 37, 1000])
def test_a_row_does_not_depend_on_the_others(vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)) * 3
    cut = Sampling(1, temperature=0.7, top_p=0.8, min_p=0.01)
    kinds = [Sampling(1, repetition_penalty=1.3, presence_penalty=0.2), cut, Sampling(1, temperature=0)] * 3
    noise = uniforms([0] * 9, list(range(9)), [1] * 9)
    tokens, logprobs = sample(logits, kinds, noise)
    for i in range(9):
        token, logprob = sample(logits[i : i + 1], kinds[i : i + 1], noise[i : i + 1])
        assert torch.equal(token, tokens[i : i + 1]) and torch.equal(logprob, logprobs[i : i + 1])


def test_a_row_tells_all_tokens_that_could_come() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, 3.0]]).repeat(4, 1)
    settings = [{"top_k": 2}, {}, {"top_p": 0.9, "token_masks": False}, {"top_p": 0.9}]
    samplings = [Sampling(max_tokens=1, **each) for each in settings]  # type: ignore[arg-type]
    rows = sampler(samplings, 4)
    drawn = rows(logits, torch.full((4,), 0.5, dtype=torch.float64))
    masks = rows.token_masks(drawn)
    allowed = [row if row is None else np.frombuffer(row, np.int32).tolist() for row in masks]
    assert allowed == [[0, 3], None, None, [0, 2, 3]]  # probabilities 0.24, 0.03, 0.09, 0.64
    assert drawn.logprobs[3].exp().item() == pytest.approx(math.exp(3) / sum(map(math.exp, (1, 2, 3))))
