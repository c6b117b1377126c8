"""What decides how a step is rounded: whatever changes it is told, so that a repeat is held to it."""

from __future__ import annotations

import pytest
import torch

from millrace.trainer.arithmetic import arithmetic

CPU = torch.device("cpu")


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"])
def test_a_limit_on_instructions_is_told(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert f"{variable}=" not in arithmetic(CPU, 8192, False)
    monkeypatch.setenv(variable, "avx2")
    assert f"{variable}=avx2" in arithmetic(CPU, 8192, False)


def test_packing_and_recomputation_are_told() -> None:
    assert len({arithmetic(CPU, budget, again) for budget in (64, 128) for again in (False, True)}) == 4
