"""Devices: the figures of data sheets, and the fraction that software achieves.

Peaks are dense (no structured sparsity). Link rates are bytes per second in one direction. `None`: the device
has no such unit. Nothing here is tuned to a training system's published results.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.errors import ConfigError

TERA, GIGA = 1e12, 1e9
DEVICE_MTBF_H = 54 * 24 * 16_384 / 419
"""Mean hours between failures of one device, with its share of host, network and software: 419 unexpected
interruptions in 54 days on 16,384 H100s (Llama 3, arXiv:2407.21783, section 3.3.4)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU core."""

    name: str
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    scale_up_bytes_per_s: float  # to the other devices of its host or pod (NVLink, ICI)
    scale_out_bytes_per_s: float  # its share of the host's network
    host_bytes_per_s: float  # to host memory
    devices_per_host: int
    source: str

    def flops(self, dtype: str) -> float:
        """Peak for `bf16` or `fp8`; a device without fp8 units computes in bf16."""
        return self.fp8_flops if dtype == "fp8" and self.fp8_flops else self.bf16_flops


def _device(
    name: str,
    flops: tuple[float, float | None],
    memory: tuple[float, float],
    links: tuple[float, float, float],
    *,
    devices_per_host: int = 8,
    source: str,
) -> Device:
    """In TFLOP/s (bf16, fp8), GB and GB/s of memory, and GB/s of links (up, out, host)."""
    return Device(
        name,
        bf16_flops=flops[0] * TERA,
        fp8_flops=flops[1] * TERA if flops[1] else None,
        memory_bytes=memory[0] * GIGA,
        memory_bytes_per_s=memory[1] * GIGA,
        scale_up_bytes_per_s=links[0] * GIGA,
        scale_out_bytes_per_s=links[1] * GIGA,
        host_bytes_per_s=links[2] * GIGA,
        devices_per_host=devices_per_host,
        source=source,
    )


_NIC = "network: one 400 Gbit/s port per device, as in DGX"
_ALL = (
    _device(
        "H100",
        (989.4, 1978.9),
        (80, 3350),
        (450, 50, 64),
        source=f"NVIDIA H100 SXM5 data sheet; NVLink 900 GB/s both ways; PCIe 5 x16; {_NIC}",
    ),
    _device(
        "H800",
        (989.4, 1978.9),
        (80, 3350),
        (200, 50, 64),
        source="H100 with NVLink cut to 400 GB/s both ways; 8 x 400 Gbit/s (arXiv:2510.12633, section 8)",
    ),
    _device(
        "H200",
        (989.4, 1978.9),
        (141, 4800),
        (450, 50, 64),
        source=f"NVIDIA H200 SXM data sheet; {_NIC}",
    ),
    _device(
        "H20",
        (148.0, 296.0),
        (96, 4000),
        (450, 50, 64),
        source="NVIDIA HGX H20: 148 TFLOP/s bf16, 96 GB, 4.0 TB/s, NVLink 900 GB/s both ways "
        f"(as used in arXiv:2511.00796 and arXiv:2512.22560); {_NIC}",
    ),
    _device(
        "A100",
        (312.0, None),
        (80, 2039),
        (300, 25, 32),
        source="NVIDIA A100 80 GB SXM data sheet; PCIe 4 x16; network: 200 Gbit/s per device, as in DGX",
    ),
    _device(
        "B200",
        (2250.0, 4500.0),
        (180, 8000),
        (900, 50, 64),
        source=f"NVIDIA DGX B200 data sheet, per device and dense; {_NIC}",
    ),
    _device(
        "TPU v5p",
        (459.0, None),
        (95, 2765),
        (600, 12.5, 32),
        devices_per_host=4,
        source="Google Cloud TPU v5p documentation: ICI 4800 Gbit/s per chip; host network 100 Gbit/s a chip "
        "and PCIe 4 assumed",
    ),
    _device(
        "CPU core",
        (0.034, None),
        (12, 18),
        (18, 5.5, 18),
        devices_per_host=2,
        source="measured on a two-core server: float32 matmul about 34 GFLOP/s a core, memcpy 18 GB/s, "
        "sockets 5.5 GB/s; it computes in float32",
    ),
)

DEVICES = {entry.name: entry for entry in _ALL}


def device(name: str) -> Device:
    """Raises: ConfigError for a name that is not in the table."""
    if name not in DEVICES:
        raise ConfigError(f"no device is called {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]
