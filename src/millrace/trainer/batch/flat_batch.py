"""A batch as flat arrays, one entry per completion token, and the trees that index into them.

    loss = sum over trained tokens of weight * objective

Here every token gets its advantage, its weight in the loss and its staleness, for the whole batch at once. So
neither micro-batches nor the packing of the tokens can change a gradient.

Each trajectory is one sequence, or several where it has forks behind its prompt. Only tokens of a sequence's
own are trained: those before its fork are trained in an earlier sequence. So a token has one advantage, one
weight and one place in the flat arrays, however many sequences see the token.

Shape suffixes: C = completion tokens of the batch, in order of groups and sequences, trained or not; S =
sequences of the batch; G = those of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms import Algorithm, ComparedGroup
from millrace.algorithms.build import Normalize
from millrace.core.completion.forks import continued, path
from millrace.core.errors import DataError
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.packing import Branch, Tree
from millrace.trainer.recorded import OWN, TokenMasks, routing_of, token_masks_of


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """`minibatches`: the trees of each optimizer step of an epoch."""

    minibatches: list[list[Tree]]
    behavior_C: NDArray[np.float32]
    advantages_C: NDArray[np.float64]
    weights_C: NDArray[np.float64]
    staleness_C: NDArray[np.int64]
    after_swap_C: NDArray[np.bool_]  # sampled under another version than its sequence's first token
    sequence_C: NDArray[np.int64]  # index of its sequence
    trained_S: NDArray[np.int64]  # trained tokens of a sequence
    proximal_C: NDArray[np.float64]  # log-probs under the policy at the batch's beginning; NaN until computed
    reference_C: NDArray[np.float64]  # log-probs under the reference; NaN until computed
    values_C: NDArray[np.float64]  # of the critic at the batch's beginning; 0 until computed
    returns_C: NDArray[np.float64]  # targets of the critic
    num_trained: int
    masks_C: TokenMasks | None  # None: every token could come everywhere

    def by_advantage(self, trees: list[Tree], apart: int = 0) -> tuple[list[Tree], list[Tree]]:
        """Trees with a trained token whose advantage is not 0, and the other trees. All trees, and none, if
        the others have fewer than `apart` tokens."""
        advantaged, others = list[Tree](), list[Tree]()
        for tree in trees:
            trained = (branch.first_index + np.flatnonzero(branch.mask) for branch in tree.branches)
            found = any(self.advantages_C[tokens].any() for tokens in trained)
            (advantaged if found else others).append(tree)
        few = sum(branch.num_forwarded for tree in others for branch in tree.branches) < apart
        return (trees, []) if few else (advantaged, others)


def flatten(
    batch: Batch,
    algorithm: Algorithm,
    *,
    max_tokens: int,
    minibatches: int = 1,
    penalties_S: NDArray[np.float64] | None = None,
    values_C: NDArray[np.float64] | None = None,
) -> FlatBatch:
    """Groups stay complete and in order. Each of the `minibatches` has its own weights. `penalties_S` are
    subtracted from the rewards that the algorithm sees. None: the algorithm has no penalty, or the penalties
    are not computed yet; every trajectory is then trained. `values_C`: of the critic; None: not computed
    yet, and 0.

    Raises DataError: no trained token at all, a mask of another length than its tokens, a token of a newer
    version, a log-prob that is not finite, an invalid group, or a failure of `Algorithm.advantages`.
    Degenerate: `Algorithm.trained` keeps nothing -> no minibatch.
    """
    sequences = [sequence for group in batch.groups for sequence in group.sequences]
    for sequence in sequences:
        refuse_misaligned(sequence, batch.version)
    masks = [mask_of(sequence) for sequence in sequences]
    if not any(mask.any() for mask in masks):
        raise DataError(f"the batch of version {batch.version} has no token to train on: every mask is empty")
    if penalties_S is None:
        penalties_S = np.zeros(len(sequences))
        algorithm = algorithm if algorithm.penalty is None else replace(algorithm, trained=None)
    if values_C is None:
        values_C = np.where(np.concatenate(masks), 0.0, np.nan)
    lengths = [len(mask) for mask in masks]
    values = np.split(values_C, np.cumsum(lengths)[:-1])
    advantages, masks = _advantages(batch, algorithm, masks, penalties_S, values, max_tokens)
    trained_S = np.asarray([mask.sum() for mask in masks])
    slices = _minibatch_slices([len(group.sequences) for group in batch.groups], minibatches)
    weights = [
        weight
        for _, members in slices
        for weight in token_weights(masks[members], algorithm.normalize, max_tokens=max_tokens)
    ]
    trees = trees_of(batch.groups, masks, whole=algorithm.compares_sequences)
    behavior_C = np.concatenate([np.asarray(s.columns.logprobs) for s in sequences])
    advantages_C = np.concatenate(advantages)
    versions_C = np.concatenate([versions_of(s) for s in sequences])
    return FlatBatch(
        minibatches=[list(chain(*trees[groups])) for groups, members in slices if trained_S[members].any()],
        behavior_C=behavior_C,
        advantages_C=_over_batch(algorithm, advantages_C.copy(), np.concatenate(masks)),
        weights_C=np.concatenate(weights),
        staleness_C=batch.version - versions_C,
        after_swap_C=versions_C != np.repeat([s.columns.version_first or 0 for s in sequences], lengths),
        sequence_C=np.repeat(np.arange(len(masks)), lengths),
        trained_S=trained_S,
        proximal_C=np.full(len(behavior_C), np.nan),
        reference_C=np.concatenate([reference_of(s) for s in sequences]),
        values_C=values_C,
        returns_C=advantages_C + values_C,
        num_trained=int(trained_S.sum()),
        masks_C=token_masks_of(sequences),
    )


def penalties(
    flat: FlatBatch,
    penalty: Callable[..., NDArray[Any]],
    proximal_C: NDArray[np.floating[Any]],
    reference_C: NDArray[np.floating[Any]],
) -> NDArray[np.float64]:
    """The sum of the penalties of each sequence's tokens: (S,)."""
    trained_C = flat.weights_C > 0
    penalty_N = penalty(proximal_C[trained_C].astype(float), reference_C[trained_C].astype(float))
    return np.bincount(flat.sequence_C[trained_C], penalty_N, minlength=len(flat.trained_S)).astype(float)


def mask_loss(flat: FlatBatch, loss_mask: Callable[..., NDArray[Any]]) -> None:
    """Remove tokens from the loss by `Algorithm.loss_mask`, in place. The other tokens keep their weight."""
    trained_C = flat.weights_C > 0
    policies = flat.proximal_C[trained_C], flat.behavior_C[trained_C]
    flat.weights_C[trained_C] *= loss_mask(*policies, flat.advantages_C[trained_C])


def _minibatch_slices(sizes: list[int], count: int) -> list[tuple[slice, slice]]:
    """The groups and the sequences of each minibatch: as equal as possible, at least one group each."""
    count = min(count, len(sizes))
    begins = [len(sizes) * i // count for i in range(count + 1)]
    first = [sum(sizes[:begin]) for begin in begins]
    return [(slice(begins[i], begins[i + 1]), slice(first[i], first[i + 1])) for i in range(count)]


def _advantages(
    batch: Batch,
    algorithm: Algorithm,
    masks: list[NDArray[np.bool_]],
    penalties_S: NDArray[np.float64],
    values: list[NDArray[np.float64]],
    max_tokens: int,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.bool_]]]:
    """For every sequence, the advantages of its tokens, and its mask of trained tokens."""
    advantages: list[NDArray[np.float64]] = []
    trained_masks: list[NDArray[np.bool_]] = []
    for group in batch.groups:
        members = slice(len(advantages), len(advantages) + len(group.sequences))
        rewards, truncated = [s.reward for s in group.sequences], [s.truncated for s in group.sequences]
        group_values = values[members] if algorithm.critic else None
        compared = ComparedGroup.of(rewards, masks[members], truncated, max_tokens, group_values)
        compared = compared.minus(penalties_S[members])
        own = [numbers_of(s) for s in group.sequences]
        compared = replace(compared, turn_rewards=_turn_rewards(group, compared.turns_G), sequence_of=own)
        trains_G = np.ones(len(rewards), bool) if algorithm.trained is None else algorithm.trained(compared)
        advantages += _by_token(algorithm, compared, group.group_id)
        trained_masks += [mask & trains for mask, trains in zip(masks[members], trains_G, strict=True)]
    return advantages, trained_masks


def _turn_rewards(group: TrainGroup, turns_G: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """The rewards of each sequence's turns; NaN where the reward function gave none."""
    return [
        np.array([s.metrics.get(f"turn_{k + 1}", np.nan) for k in range(turns)])
        for s, turns in zip(group.sequences, turns_G, strict=True)
    ]


def _over_batch(
    algorithm: Algorithm, advantages_C: NDArray[np.float64], mask_C: NDArray[np.bool_]
) -> NDArray[np.float64]:
    if algorithm.whole_batch is not None and mask_C.any():
        advantages_C[mask_C] = algorithm.whole_batch(advantages_C[mask_C])
    return advantages_C


def _by_token(algorithm: Algorithm, group: ComparedGroup, group_id: int) -> list[NDArray[np.float64]]:
    try:
        with np.errstate(over="ignore"):  # of an absurd reward; the loss shows the overflow
            advantages = algorithm.advantages(group)
    except (AttributeError, TypeError) as error:
        raise DataError(
            f"`Algorithm.advantages` failed for group {group_id}: {type(error).__name__}: {error}.\n"
            "  Its argument is a millrace.algorithms.ComparedGroup: the rewards are its `rewards_G`"
        ) from error
    pairs = zip(advantages, group.lengths_G, strict=True)
    return [np.broadcast_to(np.asarray(advantage, float), length) for advantage, length in pairs]


def mask_of(sequence: TrainSequence) -> NDArray[np.bool_]:
    """The loss mask."""
    if sequence.mask is None:
        return np.ones(len(sequence.columns), dtype=bool)
    return np.asarray(sequence.mask, dtype=bool)


def reference_of(sequence: TrainSequence) -> NDArray[np.float64]:
    """Log-probs under the reference; NaN: the trainer computes them."""
    if sequence.reference is None:
        return np.full(len(sequence.columns), np.nan)
    return np.asarray(sequence.reference, float)


def versions_of(sequence: TrainSequence) -> NDArray[np.int64]:
    """The version that sampled each token."""
    return _repeated(sequence.columns.runs)


def numbers_of(sequence: TrainSequence) -> NDArray[np.int64]:
    """Which sequence of the trajectory each token belongs to (`core.completion.forks.continued`)."""
    return _repeated(continued(sequence.columns.forks, len(sequence.columns)))


def _repeated(runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    if len(runs) == 1:  # of most sequences
        return np.full(runs[0][1], runs[0][0])
    value, count = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(value, count)


def refuse_misaligned(sequence: TrainSequence, version: int) -> None:
    """Before the batch of `version`.

    Raises: DataError: a mask of another length than its tokens, a token of a newer version, or a log-prob of
    a trained token that is not finite.
    """
    mask, columns = mask_of(sequence), sequence.columns
    if len(mask) != len(columns):
        raise DataError(
            f"trajectory {sequence.trajectory_id} does not align: {len(columns)} tokens, "
            f"{len(mask)} mask entries"
        )
    trained = np.asarray(columns.logprobs)[mask]
    if not np.isfinite(trained).all():
        raise DataError(
            f"trajectory {sequence.trajectory_id} has behavior log-probs that are not finite: "
            f"{trained[~np.isfinite(trained)].tolist()[:5]}. The engine must record the log-probs of sampled "
            "tokens"
        )
    newest = max((run_version for run_version, _ in columns.runs), default=version)
    if newest > version:
        raise DataError(
            f"trajectory {sequence.trajectory_id} has a token of version {newest}, "
            f"newer than the trainer's version {version}"
        )


def token_weights(
    masks: Sequence[NDArray[np.bool_]], normalize: Normalize, *, max_tokens: int
) -> list[NDArray[np.float64]]:
    """Weight of every completion token; zero where the mask is.

    With N sequences, n_i trained tokens in sequence i:

        sequence    1 / (N n_i)           mean over a sequence, then over sequences (GRPO)
        token       1 / sum_i n_i         mean over all tokens (DAPO, arXiv:2503.14476)
        max_tokens  1 / (N max_tokens)    sum over the constant budget (Dr. GRPO, arXiv:2503.20783)

    Shapes:
        masks    one (length_i,) per sequence
        returns  one (length_i,) per sequence
    N and n_i are of the whole optimizer step, and no weight depends on groups. So a group that lost
    trajectories counts less than a complete group, in proportion to its sequences or tokens.

    Degenerate:
        A sequence without a trained token gets zeros, and still counts in N.
    """
    counts = [int(mask.sum()) for mask in masks]
    match normalize:
        case "sequence":
            scales = [1.0 / (len(masks) * max(count, 1)) for count in counts]
        case "token":
            scales = [1.0 / max(sum(counts), 1)] * len(masks)
        case "max_tokens":
            scales = [1.0 / (len(masks) * max_tokens)] * len(masks)
    return [np.where(mask, scale, 0.0) for mask, scale in zip(masks, scales, strict=True)]


# ---------------------------------------------------------------- trees


Member = tuple[TrainSequence, NDArray[np.bool_], int, NDArray[np.int32] | None]
"""A trajectory, which of its tokens are trained, where these are in the flat arrays, and its experts."""


def trees_of(
    groups: Sequence[TrainGroup], masks: Sequence[NDArray[np.bool_]], *, whole: bool
) -> list[list[Tree]]:
    """The trees of each group: one, or one of each trajectory if one of these has several sequences. `masks`:
    which tokens of each trajectory are trained. `whole`: all sequences of a trajectory are in one row."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    firsts = accumulate(map(len, masks), initial=0)
    members = zip(sequences, masks, firsts, routing_of(sequences), strict=False)
    trees = []
    for group in groups:
        own = list(islice(members, len(group.sequences)))
        forked = any(fork.start for sequence in group.sequences for fork in sequence.columns.forks)
        each = [[member] for member in own] if forked else [own]
        trees.append([_tree(np.asarray(group.prompt), together, whole and forked) for together in each])
    return trees


def _tree(prompt: NDArray[Any], members: Sequence[Member], whole: bool) -> Tree:
    kept = [fork.kept for sequence, *_ in members for fork in sequence.columns.forks if not fork.after]
    shared = min([len(prompt), *kept])
    branches = [branch for member in members for branch in _branches(prompt, shared, *member)]
    return Tree(prompt[:shared], branches, whole)


def _branches(
    prompt: NDArray[Any],
    shared: int,
    sequence: TrainSequence,
    mask: NDArray[np.bool_],
    first: int,
    routing_CW: NDArray[np.int32] | None,
) -> Iterator[Branch]:
    """The sequences of a trajectory, without the first `shared` tokens of the prompt."""
    columns = sequence.columns
    starts = sorted({0, *(fork.start for fork in columns.forks)})
    for start, stop in zip(starts, [*starts[1:], len(columns)], strict=True):
        kept, parts = path(columns.forks, stop)
        before = prompt[shared:kept]
        index = np.concatenate([np.arange(*part) for part in parts])  # of its tokens in the columns
        trained = np.concatenate([np.zeros(len(before), bool), mask[index] & (index >= start)])
        tokens = np.concatenate([before, np.asarray(columns.tokens)[index]])
        experts = routing_CW
        if experts is not None:
            experts = np.pad(experts[index], ((len(before), 0), (0, 0)), constant_values=OWN)
        yield Branch(tokens, trained, first + stop - len(tokens), experts)
