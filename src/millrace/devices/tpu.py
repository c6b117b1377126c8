"""The devices of a process, before JAX is imported."""

from __future__ import annotations

import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI identities of TPUs (JAX 0.10.2, `jax/_src/hardware_utils.py`). Google's network cards have others."""


def simulate_devices(count: int) -> None:
    """A CPU becomes `count` devices of JAX. Raises nothing: it must come before JAX is imported."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"


def computes_on_tpu(asked: str, pci: Path = PCI_DEVICES) -> bool:
    """Whether JAX would take this host's TPUs. `asked`: `model.device`. JAX_PLATFORMS of the user counts."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return asked == "auto" and (not platforms or "tpu" in platforms) and any(map(_is_tpu, pci.glob("*")))


def _is_tpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == GOOGLE and kind in TPUS
