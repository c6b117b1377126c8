"""Block diffusion on one page: an engine, a replay of its log-probs, and reinforcement learning with both.

    python examples/block_diffusion.py            # minutes on one core
    python examples/block_diffusion.py --quick    # seconds: shows that it runs

A completion is written in blocks. A block begins as masks. Each denoising step reveals some positions: their
tokens are drawn from what the model says of the block as it is then. The record of a trajectory is its
tokens, their log-probs, and the step at which each was revealed. `replay` computes the log-probs from it.
Noise, advantages, weights and objective are the framework's. The task is the quickstart's: spell a word
backwards. reports/block-diffusion.md says what a run of the framework would need.

Shape suffixes: B = sequences, S = positions of a forward pass, P / T = positions of prompts / completions,
K = positions of a block, D = hidden size, V = vocabulary without the mask, C = cached positions.
"""

import argparse
import copy
import random
import string
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import reasoning_gym
import torch
import torch.nn.functional as F
from torch import nn

from millrace.algorithms import ComparedGroup, build
from millrace.algorithms.logprobs import TokenLogprobs
from millrace.config.tables.algorithms import PolicyGradient
from millrace.rollout.noise import Noise
from millrace.trainer.batch.flat_batch import token_weights

K = 4  # positions of a block
PROMPT, COMPLETION = 12, 12  # tokens, in whole blocks: prompts are filled up on the left
ALPHABET = "\0" + string.ascii_letters + ">"  # token 0 ends a completion, and fills up
END = 0
TRAIN_ROWS, HELD_OUT_ROWS, WARM_START_ROWS = 1, 2, 7  # seeds of the data sets
GROUP_SIZE = 8
RIGHT, COPIED = 0.3, 0.5  # shares of the demonstrations, as in the quickstart


# ---------------------------------------------------------------- the model


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BSD, angles, allowed, cached):
        size = (*x_BSD.shape[:2], self.heads, -1)
        q, k, v = (x.view(size).transpose(1, 2) for x in self.qkv(self.norms[0](x_BSD)).chunk(3, dim=-1))
        q, k = rotated(q, *angles), rotated(k, *angles)
        own = k, v
        if cached is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cached, own, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x_BSD = x_BSD + self.out(seen.transpose(1, 2).reshape(x_BSD.shape))
        gate, up = self.up(self.norms[1](x_BSD)).chunk(2, dim=-1)
        return x_BSD + self.down(F.silu(gate) * up), own


def rotated(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class BlockModel(nn.Module):
    """A decoder without a causal mask: the caller says which keys a position sees. The output of a position
    is of its own token, not of the next one. The mask is the last row of the embedding, and never an
    output."""

    def __init__(self, vocab, width=96, layers=3, heads=4):
        super().__init__()
        self.mask, self.width = vocab, width // heads
        self.embedding = nn.Embedding(vocab + 1, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens_BS, positions_S, allowed=None, cache=None):
        """Hidden states (B, S, D), and keys and values of each layer."""
        rates = 1000.0 ** -(torch.arange(0, self.width, 2) / self.width)
        angles = positions_S[:, None].to(self.norm.weight) * rates
        x_BSD, kept = self.embedding(tokens_BS), []
        for i, layer in enumerate(self.layers):
            x_BSD, own = layer(x_BSD, (angles.cos(), angles.sin()), allowed, cache and cache[i])
            kept.append(own)
        return self.norm(x_BSD), kept

    def logprobs(self, hidden):
        return (hidden @ self.embedding.weight[: self.mask].T).log_softmax(-1)


# ---------------------------------------------------------------- the engine


class Record(NamedTuple):
    """What an engine reports of trajectories, (B, T) each. A token's `steps` is its denoising step, counted
    within its block."""

    tokens: torch.Tensor
    steps: torch.Tensor
    logprobs: torch.Tensor


class Reveal(NamedTuple):
    """Which masked positions a step reveals: the `num` with the highest score, and with a `threshold` all
    whose confidence is above it.

    order   left: from left to right. noise: as noise says. confidence: the probability of the likeliest
            token. sampled: the probability of the token that was drawn; then a drawn token can be thrown
            away, and `replay` has too few factors
    """

    order: str = "confidence"
    num: int = 1
    threshold: float | None = None

    def __call__(self, masked_BK, logprobs_BKV, drawn_BK, noise_BK):
        """The revealed positions, (B, K) booleans."""
        confidence_BK = logprobs_BKV.amax(-1)
        match self.order:
            case "left":
                score_BK = -torch.arange(masked_BK.shape[1]).expand_as(masked_BK)
            case "noise":
                score_BK = noise_BK
            case "confidence":
                score_BK = confidence_BK
            case "sampled":
                score_BK = confidence_BK = logprobs_BKV.gather(-1, drawn_BK[..., None])[..., 0]
        score_BK = score_BK.double().masked_fill(~masked_BK, -torch.inf)
        order_BK = score_BK.argsort(dim=1, descending=True, stable=True)
        revealed_BK = (order_BK.argsort(dim=1) < self.num) & masked_BK
        if self.threshold is not None:
            revealed_BK |= masked_BK & (confidence_BK.exp() > self.threshold)
        return revealed_BK


@torch.no_grad()
def sample(model, prompts_BP, reveal, noise, length=COMPLETION, block=K, greedy=False):
    """Completions of `length` tokens, and how many positions the model computed.

    Keys and values of a finished block are computed once more, from its tokens without masks. The noise of a
    token is a function of (seed, trajectory, position, step), so no neighbour and no replica changes it.
    """
    num, prompt = prompts_BP.shape
    u_BTX = torch.from_numpy(noise.uniforms([0] * num, length * (block + 1))).view(num, length, block + 1)
    _, cache = model(prompts_BP, torch.arange(prompt), block_causal(prompt, block))
    computed, blocks = num * prompt, []
    for start in range(0, length, block):
        positions_K = torch.arange(prompt + start, prompt + start + block)
        tokens_BK = torch.full((num, block), model.mask)
        steps_BK, logprobs_BK = torch.zeros_like(tokens_BK), torch.zeros(num, block).to(cache[0][0])
        for step in range(block):
            masked_BK = tokens_BK == model.mask
            if not masked_BK.any():
                break
            logprobs_BKV = model.logprobs(model(tokens_BK, positions_K, cache=cache)[0])
            u_BKX = u_BTX[:, start : start + block]
            drawn_BK = logprobs_BKV.argmax(-1) if greedy else draw(logprobs_BKV, u_BKX[..., step])
            revealed_BK = reveal(masked_BK, logprobs_BKV, drawn_BK, u_BKX[..., block])
            of_drawn_BK = logprobs_BKV.gather(-1, drawn_BK[..., None])[..., 0]
            logprobs_BK = torch.where(revealed_BK, of_drawn_BK, logprobs_BK)
            steps_BK = steps_BK.masked_fill(revealed_BK, step)
            tokens_BK = torch.where(revealed_BK, drawn_BK, tokens_BK)
            computed += num * block
        cache = longer(cache, model(tokens_BK, positions_K, cache=cache)[1])
        computed += num * block
        blocks.append((tokens_BK, steps_BK, logprobs_BK))
    return Record(*(torch.cat(column, dim=1) for column in zip(*blocks, strict=True))), computed


def longer(cache, own):
    """Keys and values of all layers, with those of another block."""
    return [
        tuple(torch.cat(pair, dim=2) for pair in zip(*pairs, strict=True))
        for pairs in zip(cache, own, strict=True)
    ]


def draw(logprobs_BKV, u_BK):
    """The tokens where the cumulative probability passes `u_BK`."""
    cumulative_BKV = logprobs_BKV.double().exp().cumsum(-1)
    targets_BK = u_BK * cumulative_BKV[..., -1]
    found_BK = torch.searchsorted(cumulative_BKV, targets_BK[..., None], right=True)[..., 0]
    return found_BK.clamp(max=logprobs_BKV.shape[-1] - 1)


def block_causal(length, block):
    blocks_S = torch.arange(length) // block
    return blocks_S[:, None] >= blocks_S


# ---------------------------------------------------------------- the trainer


def layout(prompt, length, copies, block=K):
    """Positions (S,) and which keys each sees (S, S), of a row: the clean sequence, then noisy copies of the
    completion. A noisy block sees itself and the clean blocks before it, as in the engine."""
    positions_S = torch.cat([torch.arange(prompt + length), torch.arange(length).repeat(copies) + prompt])
    copies_S = torch.cat([torch.full((prompt + length,), -1), torch.arange(copies).repeat_interleave(length)])
    blocks_S, clean_S = positions_S // block, copies_S < 0
    earlier = blocks_S[:, None] > blocks_S
    same = (blocks_S[:, None] == blocks_S) & (copies_S[:, None] == copies_S)
    return positions_S, (earlier & clean_S) | same


def replay(model, prompts_BP, tokens_BT, steps_BT, copies=K, block=K):
    """Log-probs of all tokens, each at its step: (B, T). One pass over 1 + `copies` sequences.

    Copy s shows the tokens that were revealed before step s, and masks. It is the state that the engine had
    at its step s, so a token's log-prob is that of its copy.
    """
    prompt, length = prompts_BP.shape[1], tokens_BT.shape[1]
    positions_S, allowed_SS = layout(prompt, length, copies, block)
    shown_BXT = steps_BT[:, None] < torch.arange(copies)[:, None]
    noisy_BXT = torch.where(shown_BXT, tokens_BT[:, None], model.mask)
    rows_BS = torch.cat([prompts_BP, tokens_BT, noisy_BXT.flatten(1)], dim=1)
    hidden_BSD, _ = model(rows_BS, positions_S, allowed_SS)
    noisy_BXTD = hidden_BSD[:, prompt + length :].unflatten(1, (copies, length))
    index = steps_BT.clamp(min=0)[:, None, :, None].expand(-1, 1, -1, noisy_BXTD.shape[-1])
    logprobs_BTV = model.logprobs(noisy_BXTD.gather(1, index)[:, 0])
    return logprobs_BTV.gather(-1, tokens_BT[..., None])[..., 0]


def policy_loss(algorithm, current_BT, behavior_BT, mask_BT, rewards_B, group_size=GROUP_SIZE):
    """The framework's objective: nothing of it knows that tokens come in blocks."""
    groups = rewards_B.reshape(-1, group_size)
    advantages_B = np.concatenate([algorithm.advantages(ComparedGroup.of(group)) for group in groups])
    weights = token_weights(list(mask_BT.numpy()), algorithm.normalize, max_tokens=mask_BT.shape[1])
    fixed_N, current_N = current_BT.detach()[mask_BT], current_BT[mask_BT]
    logprobs = TokenLogprobs(current_N, fixed_N, behavior_BT[mask_BT], fixed_N)
    advantages_BT = torch.from_numpy(advantages_B)[:, None].to(current_BT).expand_as(current_BT)
    losses_N = algorithm.objective(torch, logprobs, advantages_BT[mask_BT])
    return (losses_N * torch.from_numpy(np.stack(weights)).to(current_BT)[mask_BT]).sum()


def until_end(tokens_BT, block=K):
    """Tokens of the blocks up to that of the first END. What follows END in its block was sampled, and tokens
    of the block were drawn after it: so it is trained, too."""
    ends_BX = (tokens_BT == END).unflatten(1, (-1, block)).any(-1)
    return (ends_BX.cumsum(1) - ends_BX.long() == 0).repeat_interleave(block, dim=1)


def supervised_loss(model, prompts_BP, tokens_BT, generator):
    """A bound of -log p(completion) over random orders: of each block one random state is looked at.

    Source: masked diffusion, arXiv:2406.07524; block diffusion, arXiv:2503.09573.
    """
    ranks_BXK = torch.rand(tokens_BT.shape, generator=generator).unflatten(1, (-1, K)).argsort(-1)
    shown_BX1 = torch.randint(0, K, (*ranks_BXK.shape[:2], 1), generator=generator)
    hidden_BXK = ranks_BXK >= shown_BX1
    weights_BT = (hidden_BXK / (K - shown_BX1)).flatten(1) * until_end(tokens_BT)
    steps_BT = hidden_BXK.flatten(1).long() - 1
    logprobs_BT = replay(model, prompts_BP, tokens_BT, steps_BT, copies=1)
    return -(weights_BT * logprobs_BT).sum() / len(tokens_BT)


# ---------------------------------------------------------------- the task and the run


class Words:
    """Rows of the quickstart's task, with prompts as tokens."""

    def __init__(self, seed, size):
        options = {"min_word_len": 3, "max_word_len": 8}
        self.data = reasoning_gym.create_dataset("spell_backward", size=size, seed=seed, **options)
        self.rows = list(self.data)
        self.prompts = tokens_of([f"{row['metadata']['word']}>".rjust(PROMPT, "\0") for row in self.rows])

    def rewards(self, chosen, tokens_BT):
        texts = ["".join(ALPHABET[token] for token in row).partition("\0")[0] for row in tokens_BT.tolist()]
        scored = zip(texts, chosen, strict=True)
        return np.array([self.data.score_answer(text, self.rows[i]) for text, i in scored])


def tokens_of(texts):
    return torch.tensor([[ALPHABET.index(character) for character in text] for text in texts])


def demonstration(row, rng):
    """The right answer, a copy of the word, or the right answer with two letters swapped."""
    answer, share, at = row["answer"], rng.random(), rng.randrange(len(row["answer"]) - 1)
    swapped = answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    return answer if share < RIGHT else row["metadata"]["word"] if share < RIGHT + COPIED else swapped


def optimizer_of(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def update(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def warm_start(model, steps, seed, batch=64):
    """Supervised steps on demonstrations, most of which are wrong."""
    words = Words(WARM_START_ROWS, min(20_000, steps * batch))
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model, 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        chosen = rng.choices(range(len(words.rows)), k=batch)
        texts = [demonstration(words.rows[i], rng).ljust(COMPLETION, "\0") for i in chosen]
        loss = supervised_loss(model, words.prompts[chosen], tokens_of(texts), generator)
        update(model, optimizer, loss)
        schedule.step()
    print(f"warm start: loss {loss.item():.2f} after {steps} steps")


def evaluate(model, reveal, seed, size):
    """Shares of held-out words that are spelled right: (greedy, sampled)."""
    words, noise = Words(HELD_OUT_ROWS, size), Noise([seed] * size, range(-size, 0))
    records = [sample(model, words.prompts, reveal, noise, greedy=greedy)[0] for greedy in (True, False)]
    return [float((words.rewards(range(size), record.tokens) == 1).mean()) for record in records]


def train(model, reveal, args):
    """Reinforcement learning with weights that sample `args.staleness` versions late.

    Returns: for each step the mean reward, the gap of log-probs (NaN: not looked at), denoising steps a
    block, positions computed a sampled token, and CPU seconds of sampling and of training.
    """
    algorithm, size = build(PolicyGradient(kind=args.algorithm)), args.prompts * GROUP_SIZE
    words, optimizer = Words(TRAIN_ROWS, args.prompts * args.steps), optimizer_of(model, args.lr)
    versions, history = deque([copy.deepcopy(model)], maxlen=args.staleness + 1), []
    for step in range(args.steps):
        chosen = [step * args.prompts + i // GROUP_SIZE for i in range(size)]
        prompts = words.prompts[chosen]
        noise = Noise([args.seed] * size, range(step * size, (step + 1) * size))
        times = [time.process_time()]
        record, computed = sample(versions[0], prompts, reveal, noise)
        times.append(time.process_time())
        rewards_B, mask_BT = words.rewards(chosen, record.tokens), until_end(record.tokens)
        gap = torch.tensor(torch.nan)
        if step % 10 == 0:
            with torch.no_grad():
                again_BT = replay(versions[0], prompts, record.tokens, record.steps)
            gap = (again_BT - record.logprobs)[mask_BT].abs().max()
        times.append(time.process_time())
        copies = int(record.steps.max()) + 1
        current_BT = replay(model, prompts, record.tokens, record.steps, copies)
        update(model, optimizer, policy_loss(algorithm, current_BT, record.logprobs, mask_BT, rewards_B))
        versions.append(copy.deepcopy(model))
        block_steps = float((record.steps.unflatten(1, (-1, K)).amax(-1) + 1.0).mean())
        costs = (
            computed / size / COMPLETION - PROMPT / COMPLETION,
            times[1] - times[0],
            time.process_time() - times[2],
        )
        history.append((rewards_B.mean(), float(gap), block_steps, *costs))
    return np.array(history)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-start-steps", type=int, default=600)
    parser.add_argument("--order", choices=("left", "noise", "confidence", "sampled"), default="confidence")
    parser.add_argument("--num", type=int, default=1, help="tokens that a denoising step reveals")
    parser.add_argument("--threshold", type=float, help="and all whose confidence is above this")
    parser.add_argument("--algorithm", default="grpo", help="a preset of `algorithm.kind`")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.warm_start_steps, args.prompts = 3, 5, 4
    size = 16 if args.quick else 256
    torch.set_num_threads(1)  # so small a model is slower on more
    torch.manual_seed(args.seed)
    model, reveal = BlockModel(len(ALPHABET)), Reveal(args.order, args.num, args.threshold)
    warm_start(model, args.warm_start_steps, args.seed)
    before = evaluate(model, reveal, args.seed, size)
    history = train(model, reveal, args)
    after = evaluate(model, reveal, args.seed, size)
    rewards, tenth = history[:, 0], max(1, args.steps // 10)
    print(f"reward, first and last tenth: {rewards[:tenth].mean():.3f} -> {rewards[-tenth:].mean():.3f}")
    for name, one, other in zip(("greedy", "sampled"), before, after, strict=True):
        print(f"{name}, held-out words: {one:.3f} -> {other:.3f}")
    print(f"log-probs, recorded and replayed: largest gap {np.nanmax(history[:, 1]):.1e}")
    steps, positions, sample_s, train_s = history[:, 2:].mean(0)
    print(f"{steps:.2f} denoising steps a block, {positions:.2f} positions computed a sampled token")
    print(f"CPU seconds a step: sampling {sample_s:.3f}, training {train_s:.3f}")


if __name__ == "__main__":
    main()
