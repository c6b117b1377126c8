"""What a machine can do: bytes that it copies a second, operations of its products, and stopwatches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16, FLOP/s, of the data sheets (SXM)."""

Figures = dict[str, Any]


class Asked(Protocol):
    """The device, bytes of a copy, and rows of a matrix."""

    device: torch.device
    copied_bytes: int
    product: int


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    settle(device)
    began = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - began


def fastest(action: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    action()
    return statistics.median(seconds(action, device) for _ in range(rounds))


def ceilings(sizes: Asked, note: Callable[[Figures], None]) -> Figures:
    """Bytes a second (a copy on the device counts those read and those written), FLOP/s of a product."""
    device, count = sizes.device, sizes.copied_bytes
    on_gpu = device.type == "cuda"
    source, target = (torch.ones(count, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(count // 4, dtype=torch.uint8, pin_memory=on_gpu)
    part = source[: len(host)]
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "copy_bytes_per_s": 2 * count / fastest(lambda: target.copy_(source), device),
        "to_host_bytes_per_s": len(host) / fastest(lambda: host.copy_(part, non_blocking=True), device),
        "to_device_bytes_per_s": len(host) / fastest(lambda: part.copy_(host, non_blocking=True), device),
        **peak_rates(device, sizes.product),
    }
    note(found)
    return found


def peak_rates(device: torch.device, size: int) -> Figures:
    """FLOP/s in bfloat16: of a product of two matrices of this size, and of the data sheet or the former."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops = 2 * size**3 / fastest(lambda: a @ b, device)
    return {
        "product_flops": flops,
        "peak_flops": next((peak for key, peak in PEAKS.items() if key in name), flops),
    }
