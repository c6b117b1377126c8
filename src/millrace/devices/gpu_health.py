"""The health of this host's GPUs: the answers of `nvidia-smi` on their memory and their clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress

from millrace.devices.inventory import ANSWER_S

MEMORY = "index,name,ecc.errors.uncorrected.volatile.total"
CLOCKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Two names of one mask; a driver knows one name or both."""

SLOWED = {
    0x08: "its hardware halves its clocks or worse",
    0x20: "its driver slows it, because it is hot",
    0x40: "its hardware halves its clocks or worse, because it is hot",
    0x80: "its hardware halves its clocks or worse, because its power supply asks for it",
}
"""Bits of the mask that an idle or healthy GPU never sets. Source: NVIDIA's NVML reference,
NvmlClocksEventReasons. A limit of power (0x04) is normal at work."""


def gpu_faults(indices: Collection[int]) -> list[str]:
    """The faults of these GPUs of this host now, one sentence each. Empty if `nvidia-smi` does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None or not indices:
        return []
    for clocks in CLOCKS:
        query = [command, f"--query-gpu={MEMORY},{clocks}", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S, check=False)
            if done.returncode == 0:
                return list(faults(done.stdout, indices))
    return []


def faults(listed: str, indices: Collection[int]) -> Iterator[str]:
    """The faults in `listed`, which has one line a GPU: index, name, errors, mask. A missing value is no
    fault."""
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdigit() or int(cells[0]) not in indices:
            continue
        index, name, errors, mask = cells
        if errors.isdigit() and int(errors):
            yield (
                f"GPU {index} ({name}) has had {errors} memory errors that it could not correct: what it "
                "computes may be wrong. Reset it, and replace it if they come back"
            )
        reasons = [text for bit, text in SLOWED.items() if _bits(mask) & bit]
        if reasons:
            yield f"GPU {index} ({name}) is slow: {'; '.join(reasons)}. Look at its cooling and power"


def _bits(mask: str) -> int:
    try:
        return int(mask, 16)
    except ValueError:
        return 0
