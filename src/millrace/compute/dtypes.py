"""In which number format this machine computes fast."""

from __future__ import annotations

from typing import Any

import torch


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The format for products of weights that are held and published in `dtype`.

    It is `dtype` itself but for bfloat16 on a CPU without instructions for its products (AVX512-BF16 or
    AMX): such a CPU converts every number, and takes several times as long as in float32. Every bfloat16
    number is a float32 number, so nothing of a weight is lost.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return dtype
    return dtype if multiplies_bfloat16() else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 numbers, and torch may use them."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not tell
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
