"""What decides how a step is rounded: whatever changes it is told, so that a repeat is held to it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from millrace.config.schema import Config
from millrace.trainer.role import arithmetic


def arithmetic_of(
    budget: int = 8192, recompute: bool = False, shard: int = 1, quantization: str | None = None
) -> str:
    config = Config.model_validate(
        {
            "model": {"path": "m", "recompute": recompute},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "batch": {"token_budget": budget},
            "trainer": {"shard": shard, "quantization": quantization},
        }
    )
    return arithmetic(torch.device("cpu"), config)


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"])
def test_a_limit_on_instructions_is_told(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert f"{variable}=" not in arithmetic_of()
    monkeypatch.setenv(variable, "avx2")
    assert f"{variable}=avx2" in arithmetic_of()


def test_packing_recomputation_and_ranks_are_told() -> None:
    assert len({arithmetic_of(*chosen) for chosen in product((64, 128), (False, True), (1, 2, 4))}) == 12
    assert "trainer" not in arithmetic_of(shard=1)
    assert "trainer.quantization fp8" in arithmetic_of(quantization="fp8")
