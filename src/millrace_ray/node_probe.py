"""What a node of a cluster reports of itself. Ray runs `look` as a task on the node."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

import millrace
from millrace.core import clock
from millrace.core.errors import MillraceError
from millrace.core.placement import Host
from millrace.devices.inventory import gpu_faults, read_host
from millrace.runtime.process import check_kernel

SUFFIXES = (".py", ".c", ".css", ".js", ".toml")
"""The suffixes of the package's files."""


class NodeReport(msgspec.Struct, frozen=True):
    """`missing` are the paths that the node lacks. `problem` says why no worker can run there. `faults` are
    the faults that its GPUs report."""

    host: Host
    missing: tuple[str, ...]
    problem: str
    python: str
    package: str  # where `millrace` is, and the digest of its files
    wall_s: float
    disk_bytes: int
    faults: tuple[str, ...] = ()


def look(paths: Sequence[str], directory: str) -> NodeReport:
    """This node now. `disk_bytes` is the free space of the disk that has `directory`."""
    problem = ""
    try:
        check_kernel()
    except MillraceError as error:
        problem = str(error)
    host = read_host()
    return NodeReport(
        host=host,
        missing=tuple(path for path in paths if not Path(path).exists()),
        problem=problem,
        python=platform.python_version(),
        package=package(),
        wall_s=clock.wall(),
        disk_bytes=shutil.disk_usage(directory).free if Path(directory).exists() else 0,
        faults=tuple(gpu_faults({gpu.index for gpu in host.gpus})),
    )


def package() -> str:
    """Which Millrace this is: the digest of all files of the core and its wings. Others beside them do not
    count."""
    root, digest = Path(millrace.__file__).parents[1], hashlib.sha256()
    packages = [root / "millrace", *root.glob("millrace_*")]
    for path in sorted(path for package in packages for path in package.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
