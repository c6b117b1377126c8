"""The arithmetic of an optimizer step: two trainers with equal arithmetic make equal bytes."""

from __future__ import annotations

import os

import torch
from torch.backends import cpu

from millrace import __version__
from millrace.config.schema import Config
from millrace.devices.matmul import by_onednn
from millrace.placement.number_format import cpu_model


def arithmetic(device: torch.device, config: Config) -> str:
    """The arithmetic in words. Empty on a GPU, where the order of sums is left to chance.

    Packing (`token_budget`), ranks and threads decide the order of sums; the CPU and torch decide the
    kernels.
    """
    if device.type != "cpu":
        return ""
    facts = (
        f"Millrace {__version__}",
        f"torch {torch.__version__}",
        f"{cpu_model()} ({cpu.get_cpu_capability()})",
        f"{torch.get_num_threads()} threads",
        *(("products by oneDNN",) if by_onednn() else ()),
        f"batch.token_budget {config.batch.token_budget}",
        f"model.recompute {config.model.recompute}",
        *(f"trainer.{key} {value}" for key, value in config.trainer if isinstance(value, int) and value > 1),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name in _DECIDE),
    )
    return ", ".join(facts)


_DECIDE = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),  # oneDNN reads both names
)
