"""What a step tells of its batch."""

from __future__ import annotations

from typing import Any

from millrace.controller.step_event import StepFields
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Batch, StepResult, TrainGroup, TrainSequence
from millrace.observe.sinks.jsonl import step_scalars


def fields_of(*measured: dict[str, float]) -> dict[str, Any]:
    sequences = [
        TrainSequence(index, TokenColumns.of([1], [-1.0], 0), 0.5, truncated=False, metrics=metrics)
        for index, metrics in enumerate(measured)
    ]
    batch = Batch(0, [TrainGroup(0, token_array([1]), sequences)])
    return StepFields().of(batch, StepResult(1, {}, {}, len(sequences), 1.0))


def test_what_a_reward_measures_is_told_as_means_over_those_that_have_it() -> None:
    fields = fields_of({"length": 3.0, "right": 1.0}, {"length": 5.0}, {})
    assert fields["reward_metrics"] == {"length": 4.0, "right": 1.0}
    scalars = step_scalars(fields)
    assert (scalars["reward_metrics/length"], scalars["reward_metrics/right"]) == (4.0, 1.0)


def test_a_reward_that_is_only_a_number_adds_nothing() -> None:
    assert "reward_metrics" not in fields_of({}, {})
