"""Finds the trajectories of a batch that make its loss or gradient not finite."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from millrace.core.errors import TrainingError
from millrace.core.types import Batch, TrainGroup
from millrace.trainer.batch_step import BatchStep


def not_finite_trajectories(trainer: BatchStep, batch: Batch) -> list[int]:
    """Ids of the trajectories that cannot be trained on alone, against the rest of their group. If every
    trajectory can, the ids of the whole batch.

    A pure function of weights and batch: a repeat names the same ids. The cost is a forward and backward pass
    over the batch, and a pass over the group for each trajectory of a group that fails.
    """
    groups = [group for group in batch.groups if not _trains(trainer, batch, group)]
    named = [
        sequence.trajectory_id
        for group in groups
        for sequence, alone in zip(group.sequences, _alone(group), strict=True)
        if sequence.num_trained and not _trains(trainer, batch, alone)
    ]
    return named or [s.trajectory_id for group in batch.groups for s in group.sequences]


def _alone(group: TrainGroup) -> Iterator[TrainGroup]:
    """The group once for each sequence. Every other sequence is masked, and still counts in the baseline."""
    for alone in group.sequences:
        sequences = [s if s is alone else replace(s, mask=[False] * len(s.columns)) for s in group.sequences]
        yield replace(group, sequences=sequences)


def _trains(trainer: BatchStep, batch: Batch, group: TrainGroup) -> bool:
    if not any(sequence.num_trained for sequence in group.sequences):
        return True
    try:
        trainer.measure(Batch(batch.version, [group]))
    except TrainingError:
        return False
    finally:
        trainer.forget_gradient()
    return True
