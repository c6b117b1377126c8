"""What the kernel of `engines.own.accelerated.flash` promises, in plain torch, for tests on a CPU."""

from __future__ import annotations

import pytest
import torch

from millrace.engines.own import torch_engine
from millrace.engines.own.accelerated import flash


def flash_attention(q_MHD, keys, values, where, *, window):
    """Each segment's queries see the first `used` tokens of its slot, with a mask aligned at their end."""
    out = torch.full_like(q_MHD, torch.nan)
    ends, starts = where.query_ends.tolist(), where.key_starts.tolist()
    assert ends[0] == 0 and ends[-1] == len(q_MHD) and where.query_ends.dtype == torch.int32
    assert where.key_starts.dtype == where.used_R.dtype == torch.int32 and len(starts) == len(ends)
    for index, used in enumerate(where.used_R.tolist()):
        mine = slice(ends[index], ends[index + 1])
        count = mine.stop - mine.start
        assert count <= where.longest_query and used <= where.longest_key
        groups = q_MHD.shape[1] // keys.shape[1]
        slot = slice(starts[index], starts[index] + used)
        k, v = (x[slot].repeat_interleave(groups, 1) for x in (keys, values))
        behind = torch.arange(used - count, used)[:, None] - torch.arange(used)
        scores = torch.einsum("qhd,khd->hqk", q_MHD[mine], k) * where.kernel.scale
        weights = scores.masked_fill((behind < 0) | (behind >= (window or used)), -torch.inf).softmax(-1)
        out[mine] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def install(patch: pytest.MonkeyPatch) -> None:
    """Engines made from here on attend, and record, as on a GPU."""
    patch.setattr(flash, "flash_attention", flash_attention)
    patch.setattr(torch_engine, "has_flash", lambda *_: True)
