"""Products of float32 matrices on processors of AMD, by oneDNN.

torch takes its products from MKL, which uses AVX-512 on processors of Intel alone. oneDNN, which torch has
too, uses AVX-512 on both. There it takes half of the time.

Shape suffixes: M rows, K what is summed over, N columns.
"""

from __future__ import annotations

from functools import cache

import torch

from millrace.placement.number_format import cpu_vendor

ROWS_MIN = 32
"""With fewer rows, a call of oneDNN costs more than it saves."""
TILE = 64
"""oneDNN makes code for each number of rows, in 0.3 ms. So the trainer pads its rows to such a multiple."""


@cache
def by_onednn() -> bool:
    """Whether oneDNN's products are the faster ones. A rule and no measurement, so that equal runs agree."""
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """(M, N): a b. It has no gradient of its own."""
    return matmul_transposed(a_MK, b_KN.t())


def matmul_transposed(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """(M, N): a b^T. As `product`."""
    single = a_MK.dtype == b_NK.dtype == torch.float32 and not a_MK.is_cuda
    if not (single and a_MK.shape[0] >= ROWS_MIN and by_onednn()):
        return a_MK @ b_NK.t()
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return found
