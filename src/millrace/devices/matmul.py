"""Matmuls: of float32 matrices on AMD's processors by oneDNN, of 16-bit matrices with results in float32,
and of rows that are sorted by group, each group with a matrix of its own, in one call on GPUs.

torch's matmuls are MKL's, which uses AVX-512 only on Intel's processors. torch also has oneDNN, which uses
AVX-512 on both. On AMD's processors oneDNN takes half of the time.

No group of rows is a call of its own, and the host does not read how large a group is.

Shape suffixes: M rows, K the dimension that is summed over, N columns; of groups: G groups, I inputs, O
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F

from millrace.devices.gpu import has_own_memory
from millrace.placement.number_format import cpu_vendor

ROWS_MIN = 32
"""With fewer rows a call of oneDNN costs more than it saves."""
TILE, WIDE_TILE, WIDE = 64, 16, 256
"""oneDNN makes code for each number of rows, in 0.3 ms. So the trainer pads its rows to a multiple of `TILE`.
For a hidden size of `WIDE` and more the padding costs more than the code, and `WIDE_TILE` is the multiple."""
PACKED_MIN = 1 << 19
"""Numbers of a float32 matrix from which MKL waits for memory: 2 MB."""
ROWS_ADDED = 1 << 15
"""Of a sum so many rows are computed at once on a GPU."""


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


def tile(hidden_size: int) -> int:
    """The multiple of rows that serves a model of this size best."""
    return TILE if hidden_size < WIDE else WIDE_TILE


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """(M, N): a b, without a gradient."""
    return matmul_transposed(a_MK, b_KN.t())


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies with packed matrices of this format here."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operators, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(operators._is_mkldnn_bf16_supported())


def packing_pays(weight_NK: torch.Tensor) -> bool:
    """Whether a matmul of few rows is faster with a packed copy of this float32 matrix.

    With AVX-512 it is, by 1.1 to 2 times. With AVX2 it is slower for many rows. On a processor of Intel, MKL
    is faster with a matrix that stays in the cache. A rule decides, as in `by_onednn`."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not packs(torch.float32):
        return False
    return by_onednn() or weight_NK.numel() >= PACKED_MIN


def packed(weight_NK: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix in the layout of oneDNN's kernels. Otherwise each call makes such a copy."""
    out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
    return out


def matmul_packed(a_MK: torch.Tensor, packed_b: torch.Tensor) -> torch.Tensor:
    """(M, N): a b^T without a gradient, where `packed_b` is `packed(b)`."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, packed_b, None, "none", [], "")
    return out


def matmul_transposed(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """(M, N): a b^T, without a gradient."""
    single = a_MK.dtype == b_NK.dtype == torch.float32 and not a_MK.is_cuda
    if not (single and a_MK.shape[0] >= ROWS_MIN and by_onednn()):
        return a_MK @ b_NK.t()
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return out


def wide_factor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to `dtype`, as the second factor of `matmul_wide`. Only a GPU multiplies 16-bit numbers
    into float32 results, so elsewhere the factor is float32."""
    rounded = x.to(dtype)
    return rounded if has_own_memory(x.device) else rounded.to(torch.promote_types(dtype, torch.float32))


def matmul_wide(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """(M, N): a b, without a gradient. The result is at least float32, whatever the type of `a`."""
    if _narrow_on_gpu(a_MK):
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return matmul(a_MK.to(b_KN.dtype), b_KN)


def add_matmul(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor, scale: float = 1.0) -> None:
    """sum += scale a b, without a gradient. A GPU whose matmul cannot add needs memory for `ROWS_ADDED` rows
    of the result."""
    if _narrow_on_gpu(a_MK) and adds(a_MK.device, a_MK.dtype):
        torch.addmm(sum_MN, a_MK, b_KN, alpha=scale, out_dtype=torch.float32, out=sum_MN)
    elif _narrow_on_gpu(a_MK):
        for sum_rows, rows in zip(sum_MN.split(ROWS_ADDED), a_MK.split(ROWS_ADDED), strict=True):
            sum_rows.add_(matmul_wide(rows, b_KN), alpha=scale)
    elif a_MK.dtype == sum_MN.dtype and not by_onednn():
        sum_MN.addmm_(a_MK, b_KN.to(a_MK.dtype), alpha=scale)
    else:
        sum_MN.add_(matmul(a_MK, b_KN.to(a_MK.dtype)), alpha=scale)


def _narrow_on_gpu(x: torch.Tensor) -> bool:
    return has_own_memory(x.device) and x.dtype.itemsize < 4


@cache
def adds(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matmul of `dtype` adds its result to float32 there: older versions of torch refuse."""
    factor, total = torch.ones((16, 16), device=device, dtype=dtype), torch.ones((16, 16), device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


# ---------------------------------------------------------------- rows by group


def has_grouped(device: torch.device, dtype: torch.dtype, shapes: Iterable[Iterable[int]]) -> bool:
    """Whether torch has a kernel there for matrices of such shapes, (G, O, I): in bfloat16 on Hopper and
    Blackwell, where rows begin at multiples of 16 bytes. Elsewhere torch reads sizes on the host."""
    aligned = all(size % 8 == 0 for shape in shapes for size in tuple(shape)[1:])
    fits = aligned and dtype == torch.bfloat16 and device.type == "cuda"
    return fits and torch.cuda.get_device_capability(device)[0] in (9, 10)


def group_ends(groups_M: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(G,) int32: where the rows of each group end. `groups_M` is sorted."""
    each = torch.arange(num_groups, dtype=groups_M.dtype, device=groups_M.device)
    return torch.searchsorted(groups_M, each, right=True, out_int32=True)


def grouped_linear(x_MI: torch.Tensor, weight_GOI: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """(M, O): of each row its product with the transposed matrix of its group. With a gradient."""
    return F.grouped_mm(x_MI, weight_GOI.transpose(-2, -1), offs=ends_G)
