"""What a node of a cluster says of itself. Runs there, as a task of Ray: `look` is called by its name."""

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
from millrace.devices.gpu_health import gpu_faults
from millrace.devices.inventory import read_host
from millrace.runtime.kernel import check_kernel

SUFFIXES = (".py", ".c", ".css", ".js", ".toml")
"""Of the files that the package has."""


class Seen(msgspec.Struct, frozen=True):
    """`missing` are those paths that are not there. `problem`: why no worker can run there. `faults`: what
    its GPUs say of themselves."""

    host: Host
    missing: tuple[str, ...]
    problem: str
    python: str
    package: str  # where `millrace` is, and the digest of its files
    wall_s: float
    disk_bytes: int
    faults: tuple[str, ...] = ()


def look(paths: Sequence[str], directory: str) -> Seen:
    """This node, now. `directory` is the one whose disk counts."""
    problem = ""
    try:
        check_kernel()
    except MillraceError as error:
        problem = str(error)
    host = read_host()
    return Seen(
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
    """Which Millrace this is: the digest of all its files. What an editor or Python left beside them does not
    count."""
    root, digest = Path(millrace.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
