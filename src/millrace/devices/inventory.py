"""The cores, memory, GPUs and TPUs of this host, read from the kernel and from `nvidia-smi`, and the health
of its GPUs. Imports no torch and no JAX.

Tests make a host of any kind as a `core.placement.Host`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from millrace.core.errors import ConfigError
from millrace.core.placement import THIS_HOST, Gpu, Host

QUERY = "index,uuid,name,memory.total,memory.free"
ANSWER_S = 30.0
MIB = 1 << 20


def read_host() -> Host:
    """This host, now. Raises: ConfigError: CUDA_VISIBLE_DEVICES names a GPU that the host does not have."""
    memory_bytes, free_bytes = read_memory()
    return Host(
        name=THIS_HOST,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        gpus=visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        threads=environment_threads(),
    )


def environment_threads() -> int:
    """0: the environment does not say."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdigit() else 0


def read_memory() -> tuple[int, int]:
    """Bytes that the processes of a run may use here: in all, and free at this moment."""
    memory = dict(_meminfo())
    limits = list(_group_limits())
    total = min([memory["MemTotal"], *(limit for limit, _ in limits)])
    return total, max(0, min([memory["MemAvailable"], *(limit - used for limit, used in limits)]))


def list_gpus() -> str:
    """The answer of `nvidia-smi`: one line a GPU, the columns of `QUERY`.

    Empty if there is no driver or no GPU, or if torch is a build that can use no GPU.
    """
    command = shutil.which("nvidia-smi")
    if command is None or version("torch").endswith("+cpu"):
        return ""
    query = [command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


def visible(listed: str, names: str | None) -> tuple[Gpu, ...]:
    """The GPUs of `list_gpus` that `names` (CUDA_VISIBLE_DEVICES: numbers or the starts of UUIDs) allows.

    None allows all. Raises: ConfigError: a name that is no GPU, such as a part of one (MIG).
    """
    gpus: dict[str, Gpu] = {}
    for line in listed.splitlines():
        index, uuid, name, total, free = (cell.strip() for cell in line.split(","))
        # A GPU that shares the host's memory has no memory of its own: its cell has words.
        if total.isdigit() and free.isdigit():
            gpus[uuid] = Gpu(int(index), name, int(total) * MIB, int(free) * MIB)
    if names is None or not gpus:
        return tuple(gpus.values())
    return tuple(_named(gpus, name.strip()) for name in names.split(",") if name.strip() not in ("", "-1"))


def _named(gpus: dict[str, Gpu], name: str) -> Gpu:
    for uuid, gpu in gpus.items():
        if name == str(gpu.index) or (not name.isdigit() and uuid.startswith(name)):
            return gpu
    indices = [gpu.index for gpu in gpus.values()]
    raise ConfigError(
        f"CUDA_VISIBLE_DEVICES names {name!r}, and this host has GPUs {indices}.\n"
        "  Name whole GPUs by these numbers, or unset it"
    )


def _meminfo() -> Iterator[tuple[str, int]]:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        yield name, int(value.split()[0]) * 1024


def _group_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that the kernel cannot reclaim), of this process's control group and its
    parents."""
    with suppress(OSError):
        entries = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((entry.split(":", 2)[2] for entry in entries if entry.startswith("0::")), "/")
        for group in [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]:
            if group.is_relative_to(root):
                yield from _group_limit(group / "memory.max", group / "memory.current", group / "memory.stat")
    old = root / "memory"
    yield from _group_limit(old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat")


def _group_limit(limit: Path, used: Path, stat: Path) -> Iterator[tuple[int, int]]:
    with suppress(OSError, ValueError):
        stats = dict(line.split() for line in stat.read_text().splitlines())
        yield int(limit.read_text()), int(used.read_text()) - int(stats.get("inactive_file", 0))


# ---------------------------------------------------------------- the health of GPUs


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


# ---------------------------------------------------------------- TPUs


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
