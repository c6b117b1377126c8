"""The planned memory of a step, beside what the trainer's own code takes of fake tensors."""

from __future__ import annotations

from pathlib import Path

import memory_plan
import pytest
import torch
from fake_memory import counted_step
from memory_plan import Case, configuration
from sparse_models import SHAPES
from tests.long import few, long

from millrace.trainer.ranks.mesh import ALONE

CASES = [
    Case("0.5b", {}, recompute=False),
    Case("0.5b", {"quantization": "fp8"}, recompute=False),
    Case("7b", {"shard": 8}),
    Case("7b", {}),
    Case("7b", {"shard": 4, "tensor": 2}),
    Case("70b", {"shard": 32}),
]


@pytest.mark.parametrize("case", few(CASES, 2), ids=str)
def test_a_planned_step_is_at_most_15_percent_above_that_of_fake_tensors(case: Case, tmp_path: Path) -> None:
    result = memory_plan.measure(case, tmp_path)
    assert 1 <= result["predicted_over_fake"] < 1.15
    assert 1 <= result["moment_over_fake"] < 1.15
    assert not torch.distributed.is_initialized() and ALONE.mesh is None


@long
def test_with_recompute_a_layer_keeps_its_input_and_one_rounded_copy(tmp_path: Path) -> None:
    """torch's cache of rounded weights would keep a second one: 0.47 GB a layer at 7B."""
    config = configuration(Case("7b", {}), tmp_path)
    few, more = (
        counted_step({**SHAPES["7b"], "num_hidden_layers": layers}, config).moment for layers in (2, 12)
    )
    rounded = 2 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)
    assert (more - few) / 10 == pytest.approx(4 * 3584 * 8192 + rounded, rel=0.01)
