"""examples/block_diffusion.py: exact log-probs, noise of a token alone, and gradients without a bias."""

from __future__ import annotations

import importlib.util
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.rollout.noise import Noise

BLOCK = 2  # of the enumerations


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[2] / "examples" / "block_diffusion.py"
    spec = importlib.util.spec_from_file_location("block_diffusion", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(page, vocab, **shape):
    """A model whose probabilities are far from equal."""
    torch.manual_seed(3)
    model = page.BlockModel(vocab, **shape)
    with torch.no_grad():
        model.embedding.weight.mul_(2.0)
    return model


REVEALS = [("left", 1, None), ("noise", 2, None), ("confidence", 1, None), ("confidence", 1, 0.5)]


@pytest.mark.parametrize("how", REVEALS)
def test_the_trainer_computes_the_log_probs_that_the_engine_recorded(page, how):
    model, prompts = tiny(page, 20, width=32), torch.arange(64).view(8, 8) % 20
    record, _ = page.sample(model, prompts, page.Reveal(*how), Noise([5] * 8, range(8)))
    replayed = page.replay(model, prompts, record.tokens, record.steps)
    torch.testing.assert_close(replayed, record.logprobs, atol=5e-6, rtol=0)
    other_order = page.replay(model, prompts, record.tokens, record.steps.flip(1))
    assert (other_order - record.logprobs).abs().max() > 0.1


def test_a_trajectory_does_not_depend_on_its_neighbours(page):
    model, prompts = tiny(page, 20, width=32), torch.arange(64).view(8, 8) % 20
    together, _ = page.sample(model, prompts, page.Reveal("noise"), Noise([5] * 8, range(8)))
    alone, _ = page.sample(model, prompts[3:4], page.Reveal("noise"), Noise([5], [3]))
    assert torch.equal(alone.tokens[0], together.tokens[3])
    assert torch.equal(alone.steps[0], together.steps[3])


def test_a_block_is_trained_to_its_end_and_later_blocks_are_not(page):
    tokens = torch.tensor([[4, 5, 0, 6, 7, 8, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
    assert page.until_end(tokens, block=4).tolist() == [[True] * 4 + [False] * 4, [True] * 8]


# ---------------------------------------------------------------- every trajectory of a tiny vocabulary


def blocks(model, reveal, cache, start):
    """(probability, tokens, steps) of each end of a block, by the engine's passes, with gradients. Tokens are
    enumerated at every masked position, as the engine draws them."""
    positions = torch.arange(start, start + BLOCK)
    orders = list(permutations(range(BLOCK))) if reveal.order == "noise" else [(0,) * BLOCK]

    def descend(probability, tokens, steps, step, noise):
        masked = tokens == model.mask
        if not masked.any():
            yield probability, tokens, steps
            return
        logprobs = model.logprobs(model(tokens, positions, cache=cache)[0])
        for drawn in product(*(range(model.mask) if m else [0] for m in masked[0].tolist())):
            drawn = torch.tensor([drawn])
            revealed = reveal(masked, logprobs.detach(), drawn, noise)
            chance = (logprobs.gather(-1, drawn[..., None])[..., 0] * masked).sum().exp()
            yield from descend(
                probability * chance,
                torch.where(revealed, drawn, tokens),
                steps.masked_fill(revealed, step),
                step + 1,
                noise,
            )

    for order in orders:
        empty = torch.full((1, BLOCK), model.mask)
        weight = torch.tensor(1 / len(orders), dtype=torch.float64)
        yield from descend(weight, empty, torch.zeros_like(empty), 0, torch.tensor([order]))


def trajectories(page, model, reveal, prompt, num_blocks):
    """(probabilities (B,), tokens (B, T), steps (B, T))."""
    cache = model(prompt, torch.arange(BLOCK), page.block_causal(BLOCK, BLOCK))[1]
    found = [(torch.tensor(1.0, dtype=torch.float64), [], [], cache)]
    for start in range(BLOCK, BLOCK * (num_blocks + 1), BLOCK):
        longer = []
        for before, all_tokens, all_steps, cache in found:
            for probability, tokens, steps in blocks(model, reveal, cache, start):
                own = model(tokens, torch.arange(start, start + BLOCK), cache=cache)[1]
                grown = page.longer(cache, own)
                longer.append((before * probability, [*all_tokens, tokens], [*all_steps, steps], grown))
        found = longer
    probabilities, tokens, steps, _ = zip(*found, strict=True)
    return torch.stack(probabilities), *(torch.cat([torch.cat(x, 1) for x in y]) for y in (tokens, steps))


def gradient(model, value):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])


def world(page, order, vocab, num_blocks):
    """A model, a prompt, every trajectory, and a reward of each completion."""
    model, prompt = tiny(page, vocab, width=8, layers=1, heads=2).double(), torch.tensor([[0, 1]])
    chances, tokens, steps = trajectories(page, model, page.Reveal(order), prompt, num_blocks)
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    values = torch.rand([vocab] * tokens.shape[1], generator=torch.Generator().manual_seed(4))
    return model, prompt, chances, tokens, steps, values[tuple(tokens.T)].double()


def estimate(page, kind, model, prompt, tokens, steps, rewards, group_size):
    """The gradient of the loss that the trainer would compute of these rewards."""
    current = page.replay(model, prompt.expand(len(tokens), -1), tokens, steps, BLOCK, BLOCK)
    algorithm, mask = build(PolicyGradient(kind=kind)), torch.ones_like(tokens, dtype=torch.bool)
    loss = page.policy_loss(algorithm, current, current.detach(), mask, rewards.numpy(), group_size)
    return -gradient(model, loss)


def gap_of_reinforce(page, order):
    """Both gradients are linear in rewards: a trajectory's reward times its probability gives its share of
    the expectation. The factor undoes the weights of the loss."""
    model, prompt, chances, tokens, steps, rewards = world(page, order, vocab=2, num_blocks=2)
    exact = gradient(model, (chances * rewards).sum())
    shares = (chances.detach() * rewards) * tokens.numel()
    return (estimate(page, "reinforce", model, prompt, tokens, steps, shares, 2) - exact).abs().max(), exact


@pytest.mark.parametrize("order", ["left", "noise", "confidence"])
def test_the_expected_gradient_is_that_of_the_expected_reward(page, order):
    gap, exact = gap_of_reinforce(page, order)
    assert gap < 1e-9 < 1e-3 < exact.abs().max()


def test_an_order_by_the_drawn_tokens_makes_the_gradient_biased(page):
    gap, exact = gap_of_reinforce(page, "sampled")
    assert gap > 0.1 * exact.abs().max()


def test_the_expected_gradient_of_pairs_is_that_of_the_expected_reward(page):
    model, prompt, chances, tokens, steps, rewards = world(page, "noise", vocab=2, num_blocks=1)
    pairs = np.array(list(product(range(len(tokens)), repeat=2)))
    shares = chances.detach()[pairs].prod(1, keepdim=True) * rewards[pairs] * len(pairs) * tokens.shape[1]
    chosen = pairs.ravel()
    found = estimate(page, "rloo", model, prompt, tokens[chosen], steps[chosen], shares.flatten(), 2)
    exact = gradient(model, (chances * rewards).sum())
    torch.testing.assert_close(found, exact, atol=1e-9, rtol=0)


def test_the_example_trains_with_weights_that_sample_late(page):
    torch.manual_seed(1)
    model = page.BlockModel(len(page.ALPHABET), width=32, layers=1)
    page.warm_start(model, 2, seed=1, batch=4)
    args = SimpleNamespace(algorithm="grpo", prompts=2, steps=2, lr=1e-3, staleness=1, seed=1)
    history = page.train(model, page.Reveal(num=2), args)
    rewards, gaps, steps, positions = history[:, :4].T
    assert ((rewards >= 0) & (rewards <= 1)).all()
    assert gaps[0] < 1e-5
    assert steps.tolist() == [2, 2] and positions == pytest.approx([3, 3])
