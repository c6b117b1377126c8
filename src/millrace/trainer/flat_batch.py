"""A batch as flat arrays, one entry per completion token, and the trees that index into them.

Everything a token needs beside its log-probs is settled here, for the whole batch at once: its
advantage, its weight in the loss, its staleness. How the tokens are packed later cannot change them.

Shape suffixes: C = completion tokens of the batch, in order of groups and sequences, trained or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms import Algorithm
from millrace.core.errors import DataError
from millrace.core.types import Batch, TrainSequence
from millrace.trainer.packing import Branch, Tree
from millrace.trainer.reduction import token_weights


@dataclass(frozen=True, slots=True)
class FlatBatch:
    trees: list[Tree]
    behavior_C: NDArray[np.float32]
    advantages_C: NDArray[np.float32]
    weights_C: NDArray[np.float32]
    staleness_C: NDArray[np.int64]
    after_swap_C: NDArray[np.bool_]  # sampled after its replica went on to another version
    num_trained: int


def flatten(batch: Batch, algorithm: Algorithm, *, max_tokens: int) -> FlatBatch:
    """Raises DataError: no trained token at all, a mask of another length than its tokens, a token from
    the future, a log-prob that is not finite, or what `Algorithm.advantages` refuses."""
    sequences = [sequence for group in batch.groups for sequence in group.sequences]
    for sequence in sequences:
        _check(sequence, batch.version)
    masks = [_mask(sequence) for sequence in sequences]
    num_trained = int(sum(mask.sum() for mask in masks))
    if num_trained == 0:
        raise DataError(f"the batch of version {batch.version} has no token to train on: every mask is empty")
    rewards = [np.asarray([s.reward for s in group.sequences]) for group in batch.groups]
    with np.errstate(over="ignore"):  # of an absurd reward; the loss shows it
        advantages = np.concatenate([algorithm.advantages(g) for g in rewards]).astype(np.float32)
    weights = token_weights(masks, algorithm.normalize, max_tokens=max_tokens)
    lengths = [len(mask) for mask in masks]
    return FlatBatch(
        trees=_trees(batch, masks),
        behavior_C=np.concatenate([np.asarray(s.columns.logprobs) for s in sequences]),
        advantages_C=np.repeat(advantages, lengths),
        weights_C=np.concatenate(weights).astype(np.float32),
        staleness_C=batch.version - np.concatenate([_versions(s) for s in sequences]),
        after_swap_C=np.concatenate([_versions(s) != s.columns.version_first for s in sequences]),
        num_trained=num_trained,
    )


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
