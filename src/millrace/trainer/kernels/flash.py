"""FlashAttention 3 in place of torch's own FlashAttention 2, on Hopper, where the package is installed."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

LOG = logging.getLogger(__name__)
PACKAGE = "flash_attn_interface"
TORCHS = "FlashAttention 2 of torch"
TOLERANCE = 0.1  # of attention in bfloat16, with values of size 1


@cache
def activate(device: torch.device) -> str:
    """What computes `varlen_attn` of this process from now on; the log says so, too.

    FlashAttention 3 is taken if its package is there, the GPU is a Hopper, torch can register it, and a small
    example comes out as before.
    """
    kernel = TORCHS
    if has_flash_3(device):
        kernel = "FlashAttention 3" if _activated(device) else TORCHS
    LOG.info("attention of the trainer in bfloat16: %s", kernel)
    return kernel


def has_flash_3(device: torch.device) -> bool:
    known = hasattr(attention, "activate_flash_attention_impl") and find_spec(PACKAGE) is not None
    return known and torch.cuda.get_device_capability(device)[0] == 9


def _activated(device: torch.device) -> bool:
    try:
        expected = _example(device)
        attention.activate_flash_attention_impl("FA3")
        gap = (_example(device) - expected).abs().max().item()
    except Exception as error:  # a package that was built for another torch fails in every way
        LOG.warning("FlashAttention 3 is installed and cannot be used: %s", error)
        gap = float("inf")
    if gap < TOLERANCE:
        return True
    LOG.warning("FlashAttention 3 is off by %g on an example: it is not used", gap)
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    return False


def _example(device: torch.device) -> torch.Tensor:
    """Output and gradient of two segments, 30 and 70 tokens long, with a window."""
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn((100, heads, 64), generator=generator) for heads in (4, 4, 4))
    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in inputs)
    ends = torch.tensor([0, 30, 100], dtype=torch.int32, device=device)
    out = varlen_attn(q, k, v, ends, ends, 70, 70, window_size=(20, 0))
    assert isinstance(out, torch.Tensor)
    out.float().sum().backward()
    return torch.stack([out, *(x.grad for x in (q, k, v) if x.grad is not None)]).detach().float()
