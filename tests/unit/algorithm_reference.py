"""What every preset should do, in plain NumPy and float64: d loss / d log pi of each token of a batch.

One function a preset, from its paper's equation, with loops instead of masks. `t` is one trained sequence:
`pi`, `mu`, `old` are its log-probs under the current policy, the one that sampled and the one at the batch's
beginning; `ref` under the reference; `A` its advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

exp, log = np.exp, np.log


def ppo(u, A, low=0.2, high=0.2, dual=None):
    """d/d log pi of min(u A, clip(u) A): u A, or nothing once the ratio has gone far enough."""
    if A >= 0:
        return np.where(u < 1 + high, u * A, 0.0)
    return np.where((u > 1 - low) & (u < (dual or np.inf)), u * A, 0.0)


def tis(t, cap=2.0):
    return np.minimum(exp(t.old - t.mu), cap)


def grpo(t):
    return tis(t) * ppo(exp(t.pi - t.old), t.A)


def plain(t):
    return tis(t) * exp(t.pi - t.old) * t.A


def dapo(t):
    return tis(t) * ppo(exp(t.pi - t.old), t.A, high=0.28)


def aipo(t):
    return np.minimum(exp(t.pi - t.mu), 4.0) * t.A


def cispo(t):
    return np.minimum(exp(t.pi - t.mu), 5.0) * t.A


def decoupled(t):
    return tis(t, 5.0) * ppo(exp(t.pi - t.old), t.A)


def bypass(t):
    return ppo(exp(t.pi - t.mu), t.A)


def two_sided(t):
    return ppo(exp(t.pi - t.mu), t.A, dual=4.0)


def sequence_tis(t):
    return min(np.prod(exp(t.old - t.mu)), 5.0) * ppo(exp(t.pi - t.old), t.A)


def icepop(t):
    w = exp(t.old - t.mu)
    return np.where((w >= 0.5) & (w <= 5.0), w, 0.0) * ppo(exp(t.pi - t.old), t.A)


def gspo(t):
    s = exp(np.mean(t.pi - t.old))  # the length is in the weight of a token
    return tis(t) * ppo(np.full(len(t.pi), s), t.A, 3e-4, 4e-4)


def m2po(t):
    return t.kept * exp(t.pi - t.mu) * t.A


def dppo_tv(t):
    p, q = exp(t.pi), exp(t.mu)
    far = p - q > 0.15 if t.A > 0 else p - q < -0.15
    return np.where(far, 0.0, np.minimum(p / q, 20.0) * t.A)


def dppo_kl(t):
    p, q = exp(t.pi), exp(t.mu)
    kl = q * log(q / p) + (1 - q) * log((1 - q + 1e-8) / (1 - p + 1e-8))
    far = (kl > 0.05) & (p > q if t.A > 0 else p < q)
    return np.where(far, 0.0, np.minimum(p / q, 20.0) * t.A)


def sapo(t):
    u, tau = exp(t.pi - t.old), 1.0 if t.A > 0 else 1.05
    p = 1 / (1 + exp(-tau * (u - 1)))
    return tis(t) * 4 * p * (1 - p) * u * t.A


def deepseek_v32(t):
    if t.A < 0 and np.mean(t.mu - t.pi) > 0.1:
        return 0.0 * t.pi
    return ppo(exp(t.pi - t.mu), t.A)


def by_token(t):
    """GRPO's, where each token has an advantage of its own."""
    pairs = zip(exp(t.pi - t.old), t.A, strict=True)
    return tis(t) * np.array([float(ppo(np.array(u), A)) for u, A in pairs])


def gae(values, reward, discount=1.0, gae_lambda=0.95):
    """One advantage a token, from the definition: a sum over all later temporal differences."""
    size = len(values)
    r, after = [0.0] * (size - 1) + [reward], [*values[1:], 0.0]
    delta = [r[t] + discount * after[t] - values[t] for t in range(size)]
    return np.array(
        [sum((discount * gae_lambda) ** (k - t) * delta[k] for k in range(t, size)) for t in range(size)]
    )


def value_gradient(values, before, returns, clip=0.2):
    """d/dV of max((V - R)^2, (V_clip - R)^2) / 2."""
    near = before + np.clip(values - before, -clip, clip)
    inside = np.abs(values - before) < clip
    chosen = (values - returns) ** 2 >= (near - returns) ** 2
    return np.where(chosen, values - returns, np.where(inside, near - returns, 0.0))


def by_turn(group, alpha=1.0):
    """Of each trajectory one advantage for each trained token: MT-GRPO, with loops."""

    def normal(r):
        return (np.array(r) - np.mean(r)) / (np.std(r) + 1e-6)

    outcomes = normal([s.reward for s in group.sequences])
    turns = [[t for t, m in enumerate(s.mask) if m > (t and s.mask[t - 1])] for s in group.sequences]
    intermediate, out = {}, []
    for k in range(max(map(len, turns))):
        have = [i for i in range(len(turns)) if k < len(turns[i])]
        rewarded = [i for i in have if f"turn_{k + 1}" in group.sequences[i].metrics]
        if rewarded:
            found = normal([group.sequences[i].metrics[f"turn_{k + 1}"] for i in rewarded])
            intermediate |= {(i, k): a for i, a in zip(rewarded, found, strict=True)}
    for i, s in enumerate(group.sequences):
        A, last = [], len(turns[i]) - 1
        for t in np.flatnonzero(s.mask):
            k = sum(begin <= t for begin in turns[i]) - 1
            later = sum(alpha ** (n - k) * intermediate.get((i, n), 0.0) for n in range(k, last + 1))
            A.append(later + alpha ** (last - k) * outcomes[i])
        out.append(np.array(A))
    return out


COEFFICIENTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "max_rl", "gfpo"), grpo),
    **dict.fromkeys(("rloo", "reinforce", "raft"), plain),
    **{f.__name__: f for f in (dapo, aipo, cispo, decoupled, bypass, two_sided, sequence_tis, icepop, gspo)},
    **dict.fromkeys(("ppo", "reinforce_pp", "mt_grpo"), by_token),
    **{f.__name__: f for f in (m2po, dppo_tv, dppo_kl, sapo, deepseek_v32)},
}


def advantages(kind: str, rewards: Any, lengths: Any, max_tokens: int) -> Any:
    """(G,); NaN of what is not trained."""
    r, size = np.array(rewards, float), len(rewards)
    out = np.full(size, np.nan)
    if kind == "raft":
        out[r > 0] = r[r > 0]
    elif kind == "gfpo":
        kept = sorted(range(size), key=lambda i: lengths[i])[:4]
        out[kept] = (r[kept] - r[kept].mean()) / (r[kept].std() + 1e-6)
    elif kind == "dapo":
        r = r - np.clip((np.array(lengths) - 0.8 * max_tokens) / (0.2 * max_tokens), 0, 1)
        out = (r - r.mean()) / (r.std() + 1e-6)
    elif kind == "max_rl":
        out = (r - r.mean()) / (r.mean() + 1e-6)
    elif kind in ("reinforce", "reinforce_pp", "ppo"):
        out = r
    elif kind == "rloo":
        out = np.array([r[i] - np.delete(r, i).mean() for i in range(size)])
    elif kind in ("dr_grpo", "aipo", "deepseek_v32"):
        out = r - r.mean()
    else:
        out = (r - r.mean()) / (r.std() + 1e-6)
    return out


def gradient(kind: str, batch: Any, old: Any, pi: Any, max_tokens: int, values: Any = None) -> Any:
    """(C,): of every completion token of the batch, with respect to its log-prob. `values`: of the critic at
    the batch's beginning."""
    values = np.zeros(len(pi)) if values is None else values
    sequences, first = [], 0
    for group in batch.groups:
        trained = [int(np.sum(s.mask)) for s in group.sequences]
        A = advantages(
            kind, [s.reward for s in group.sequences], trained_or_all(kind, group, trained), max_tokens
        )
        if kind == "mt_grpo":
            A = by_turn(group)
        for s, a in zip(group.sequences, A, strict=True):
            at = first + np.flatnonzero(s.mask)
            first += len(s.mask)
            if len(at) and not np.isnan(a).any():
                mu = np.asarray(s.columns.logprobs, float)[np.flatnonzero(s.mask)]
                sequences.append(SimpleNamespace(at=at, A=a, mu=mu, old=old[at], pi=pi[at]))
    tokens = sum(len(t.at) for t in sequences)
    if kind in ("ppo", "reinforce_pp"):
        whiten(sequences, values if kind == "ppo" else None)
    if kind == "m2po":
        pushed = np.concatenate([(t.old - t.mu)[(t.old - t.mu) * t.A > 0] for t in sequences]) ** 2
        limit = max(m for m in pushed if np.minimum(pushed, m).mean() <= 0.04)
        for t in sequences:
            t.kept = ((t.old - t.mu) * t.A <= 0) | ((t.old - t.mu) ** 2 <= limit)
    total = sum(len(group.sequences) for group in batch.groups)
    out = np.zeros(first)
    for t in sequences:
        weight = 1 / tokens
        if kind in ("gspo", "sapo", "deepseek_v32"):
            weight = 1 / (total * len(t.at))
        if kind in ("dr_grpo", "rloo", "reinforce"):
            weight = 1 / (total * max_tokens)
        out[t.at] = -weight * COEFFICIENTS[kind](t)
    return out


def whiten(sequences: list[SimpleNamespace], values: Any) -> None:
    """`values`: those of a critic; None: there is none, and all tokens of a trajectory have its reward."""
    for t in sequences:
        t.A = np.full(len(t.at), t.A) if values is None else gae(values[t.at], t.A)
    every = np.concatenate([t.A for t in sequences])
    for t in sequences:
        t.A = (t.A - every.mean()) / (every.std() + 1e-6)


def trained_or_all(kind: str, group: Any, trained: list[int]) -> list[int]:
    """GFPO measures the whole completion, DAPO what the policy wrote of it."""
    return [len(s.mask) for s in group.sequences] if kind == "gfpo" else trained
