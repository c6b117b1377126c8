"""A batch as flat arrays, one entry per completion token, and the trees that index into them.

Everything a token needs beside its log-probs is settled here, for the whole batch at once: its
advantage, its weight in the loss, its staleness. How the tokens are packed later cannot change them.

Shape suffixes: C = completion tokens of the batch, in order of groups and sequences, trained or not;
S = sequences of the batch; G = those of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms import Algorithm, ComparedGroup
from millrace.core.errors import DataError
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.packing import Branch, Tree
from millrace.trainer.batch.reduction import token_weights
from millrace.trainer.batch.token_masks import TokenMasks, token_masks_of


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """`parts`: the trees of each optimizer step."""

    parts: list[list[Tree]]
    behavior_C: NDArray[np.float32]
    advantages_C: NDArray[np.float64]
    weights_C: NDArray[np.float64]
    staleness_C: NDArray[np.int64]
    after_swap_C: NDArray[np.bool_]  # sampled after its replica went on to another version
    sequence_C: NDArray[np.int64]  # index of its sequence
    trained_S: NDArray[np.int64]  # trained tokens of a sequence
    proximal_C: NDArray[
        np.float64
    ]  # log-probs under the policy at the batch's beginning, once they are known
    reference_C: NDArray[
        np.float64
    ]  # those of the reference, where the batch has them, or once they are known
    values_C: NDArray[np.float64]  # of the critic at the batch's beginning, once they are known
    returns_C: NDArray[np.float64]  # what it is to predict
    num_trained: int
    masks_C: TokenMasks | None  # None: every token could come everywhere

    @property
    def trees(self) -> list[Tree]:
        """Of the whole batch."""
        return [tree for part in self.parts for tree in part]


def flatten(
    batch: Batch,
    algorithm: Algorithm,
    *,
    max_tokens: int,
    minibatches: int = 1,
    penalties_S: NDArray[np.float64] | None = None,
    values_C: NDArray[np.float64] | None = None,
) -> FlatBatch:
    """Groups stay whole and in order; each of `minibatches` parts has weights of its own. `penalties_S` are
    taken off the rewards that the algorithm sees. None: it has no penalty, or they are not known yet. Then
    every trajectory is laid out, so that they can be found. `values_C`: of its critic; None: not known yet,
    and 0.

    Raises DataError: no trained token at all, a mask of another length than its tokens, a token from
    the future, a log-prob that is not finite, or what is no group or no advantage.
    Degenerate: `Algorithm.trained` keeps nothing -> no parts.
    """
    sequences = [sequence for group in batch.groups for sequence in group.sequences]
    for sequence in sequences:
        _check(sequence, batch.version)
    masks = [_mask(sequence) for sequence in sequences]
    if not any(mask.any() for mask in masks):
        raise DataError(f"the batch of version {batch.version} has no token to train on: every mask is empty")
    if penalties_S is None:
        penalties_S = np.zeros(len(sequences))
        algorithm = algorithm if algorithm.penalty is None else replace(algorithm, trained=None)
    if values_C is None:
        values_C = np.where(np.concatenate(masks), 0.0, np.nan)
    values = np.split(values_C, np.cumsum([len(mask) for mask in masks])[:-1])
    advantages, masks = _judged(batch, algorithm, masks, penalties_S, values, max_tokens)
    trained_S = np.asarray([mask.sum() for mask in masks])
    cuts = _cuts([len(group.sequences) for group in batch.groups], minibatches)
    weights = [
        weight
        for _, own in cuts
        for weight in token_weights(masks[own], algorithm.normalize, max_tokens=max_tokens)
    ]
    trees = _trees(batch, masks)
    behavior_C = np.concatenate([np.asarray(s.columns.logprobs) for s in sequences])
    lengths = [len(mask) for mask in masks]
    advantages_C = np.concatenate(advantages)
    return FlatBatch(
        parts=[trees[groups] for groups, own in cuts if trained_S[own].any()],
        behavior_C=behavior_C,
        advantages_C=_over_batch(algorithm, advantages_C.copy(), np.concatenate(masks)),
        weights_C=np.concatenate(weights),
        staleness_C=batch.version - np.concatenate([_versions(s) for s in sequences]),
        after_swap_C=np.concatenate([_versions(s) != s.columns.version_first for s in sequences]),
        sequence_C=np.repeat(np.arange(len(masks)), lengths),
        trained_S=trained_S,
        proximal_C=np.full(len(behavior_C), np.nan),
        reference_C=np.concatenate([_reference(s) for s in sequences]),
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
    """What the tokens of each sequence take off its reward, together: (S,)."""
    trained_C = flat.weights_C > 0
    found_N = penalty(proximal_C[trained_C].astype(float), reference_C[trained_C].astype(float))
    return np.bincount(flat.sequence_C[trained_C], found_N, minlength=len(flat.trained_S)).astype(float)


def weigh(flat: FlatBatch, kept: Callable[..., NDArray[Any]]) -> None:
    """Take out of the loss what is not kept, in place. What remains keeps its weight."""
    trained_C = flat.weights_C > 0
    policies = flat.proximal_C[trained_C], flat.behavior_C[trained_C]
    flat.weights_C[trained_C] *= kept(*policies, flat.advantages_C[trained_C])


def _cuts(sizes: list[int], count: int) -> list[tuple[slice, slice]]:
    """Groups in `count` parts as equal as can be, at most one each: which groups, and which sequences."""
    count = min(count, len(sizes))
    begins = [len(sizes) * i // count for i in range(count + 1)]
    first = [sum(sizes[:begin]) for begin in begins]
    return [(slice(begins[i], begins[i + 1]), slice(first[i], first[i + 1])) for i in range(count)]


def _judged(
    batch: Batch,
    algorithm: Algorithm,
    masks: list[NDArray[np.bool_]],
    penalties_S: NDArray[np.float64],
    values: list[NDArray[np.float64]],
    max_tokens: int,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.bool_]]]:
    """Of every sequence the advantages of its tokens, and its mask without what is not to be trained."""
    advantages: list[NDArray[np.float64]] = []
    kept: list[NDArray[np.bool_]] = []
    for group in batch.groups:
        own = slice(len(kept), len(kept) + len(group.sequences))
        rewards, cut = [s.reward for s in group.sequences], [s.truncated for s in group.sequences]
        known = values[own] if algorithm.critic else None
        judged = ComparedGroup.of(rewards, masks[own], cut, max_tokens, known).minus(penalties_S[own])
        judged = replace(judged, turn_rewards=_turn_rewards(group, judged.turns_G))
        trains_G = np.ones(len(rewards), bool) if algorithm.trained is None else algorithm.trained(judged)
        advantages += _by_token(algorithm, judged, group.group_id)
        kept += [mask & trains for mask, trains in zip(masks[own], trains_G, strict=True)]
    return advantages, kept


def _turn_rewards(group: TrainGroup, turns_G: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Of each sequence those of its turns, as its reward function named them; NaN where it named none."""
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
        with np.errstate(over="ignore"):  # of an absurd reward; the loss shows it
            found = algorithm.advantages(group)
    except (AttributeError, TypeError) as error:
        raise DataError(
            f"`Algorithm.advantages` failed for group {group_id}: {type(error).__name__}: {error}.\n"
            "  It is given a millrace.algorithms.ComparedGroup: the rewards are its `rewards_G`"
        ) from error
    return [np.broadcast_to(np.asarray(a, float), n) for a, n in zip(found, group.lengths_G, strict=True)]


def _trees(batch: Batch, masks: list[NDArray[np.bool_]]) -> list[Tree]:
    trees, first, remaining = [], 0, iter(masks)
    for group in batch.groups:
        branches = []
        for sequence in group.sequences:
            tokens = np.asarray(sequence.columns.tokens)
            branches.append(Branch(tokens, next(remaining), first))
            first += len(tokens)
        trees.append(Tree(np.asarray(group.prompt), branches))
    return trees


def _mask(sequence: TrainSequence) -> NDArray[np.bool_]:
    if sequence.mask is None:
        return np.ones(len(sequence.columns), dtype=bool)
    return np.asarray(sequence.mask, dtype=bool)


def _reference(sequence: TrainSequence) -> NDArray[np.float64]:
    unknown = np.full(len(sequence.columns), np.nan)
    return unknown if sequence.reference is None else np.asarray(sequence.reference, float)


def _versions(sequence: TrainSequence) -> NDArray[np.int64]:
    """Of every token."""
    runs = np.array(sequence.columns.runs, dtype=np.int64).reshape(-1, 2)
    return np.repeat(runs[:, 0], runs[:, 1])


def _check(sequence: TrainSequence, version: int) -> None:
    mask, columns = _mask(sequence), sequence.columns
    if len(mask) != len(columns):
        raise DataError(
            f"trajectory {sequence.trajectory_id} does not align: {len(columns)} tokens, "
            f"{len(mask)} mask entries"
        )
    trained = np.asarray(columns.logprobs)[mask]
    if not np.isfinite(trained).all():
        raise DataError(
            f"trajectory {sequence.trajectory_id} has behavior log-probs that are not finite: "
            f"{trained[~np.isfinite(trained)].tolist()[:5]}. The engine must record those of sampled tokens"
        )
    newest = max((run_version for run_version, _ in columns.runs), default=version)
    if newest > version:
        raise DataError(
            f"trajectory {sequence.trajectory_id} has a token of version {newest}, "
            f"newer than the trainer's version {version}"
        )
