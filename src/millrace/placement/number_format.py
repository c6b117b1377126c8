"""The number format that a worker computes in. Imports no torch, because the controller uses this module
too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CPUS = Path("/proc/cpuinfo")


def computing_dtype(published: str, *, on_gpu: bool) -> str:
    """The format of matmuls with weights that are published as `published`.

    The format is `published`, except for bfloat16 on a CPU without instructions for it (AVX512-BF16 or AMX).
    Such a CPU converts every number, and takes several times as long as in float32. Every bfloat16 number is
    a float32 number, so no digit of a weight is lost.
    """
    if published != "bfloat16" or on_gpu or multiplies_bfloat16():
        return published
    return "float32"


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for matmuls in bfloat16, and torch may use them."""
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "avx512")  # torch's own variable; it holds for all workers
    return limit.startswith("avx512") and not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_flags())


def cpu_flags() -> set[str]:
    """The flags of the first core, from the kernel; empty if the kernel has another name for them (ARM)."""
    return set(_of_first_core("flags").split())


def cpu_model() -> str:
    """The first core's name; empty if the kernel has none."""
    return _of_first_core("model name")


def cpu_vendor() -> str:
    """The vendor's name, such as GenuineIntel; empty if the kernel has none (ARM)."""
    return _of_first_core("vendor_id")


def _of_first_core(name: str) -> str:
    with suppress(OSError):  # not Linux
        for line in CPUS.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
