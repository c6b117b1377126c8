"""Matmuls of float32 matrices on AMD's processors, by oneDNN.

torch's matmuls are MKL's, which uses AVX-512 only on Intel's processors. torch also has oneDNN, which uses
AVX-512 on both. On AMD's processors oneDNN takes half of the time.

Shape suffixes: M rows, K the dimension that is summed over, N columns.
"""

from __future__ import annotations

from functools import cache

import torch

from millrace.placement.number_format import cpu_vendor

ROWS_MIN = 32
"""With fewer rows a call of oneDNN costs more than it saves."""
TILE = 64
"""oneDNN makes code for each number of rows, in 0.3 ms. So the trainer pads its rows to such a multiple."""


@cache
def by_onednn() -> bool:
    """Whether oneDNN's matmuls are faster. A rule decides, not a measurement, so that equal runs agree."""
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """(M, N): a b, without a gradient."""
    return matmul_transposed(a_MK, b_KN.t())


def matmul_transposed(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """(M, N): a b^T, without a gradient."""
    single = a_MK.dtype == b_NK.dtype == torch.float32 and not a_MK.is_cuda
    if not (single and a_MK.shape[0] >= ROWS_MIN and by_onednn()):
        return a_MK @ b_NK.t()
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return out
