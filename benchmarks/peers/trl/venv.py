"""The virtual environment of the TRL peer, made once in the benchmarks' cache."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = ("trl==1.16.0", "requests", "aiohttp")  # its asynchronous trainer imports the last two


def python_with_trl(cache: Path) -> Path:
    """The interpreter. torch comes without CUDA, as `scripts/setup` has it; first, so that it stays."""
    venv = cache / f"venv-{PACKAGES[0]}"
    python = venv / "bin" / "python"
    if not (venv / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        _install_torch(venv / "bin")
        subprocess.run([venv / "bin" / "pip", "install", "-qq", *PACKAGES], check=True)
        (venv / "complete").touch()
    return python


def present(cache: Path) -> Path | None:
    """An interpreter that has TRL already, this one or that of the cache. None: there is none."""
    if importlib.util.find_spec("trl") is not None:
        return Path(sys.executable)
    venv = cache / f"venv-{PACKAGES[0]}"
    return venv / "bin" / "python" if (venv / "complete").exists() else None


def _install_torch(bin_: Path) -> None:
    local = [bin_ / "pip", "install", "-qq", "--no-index", "--no-deps", TORCH]
    if subprocess.run(local, stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return
    subprocess.run([bin_ / "pip", "install", "-qq", "uv"], check=True)
    uv = [bin_ / "uv", "pip", "install", "--quiet", "--python", bin_ / "python", "--torch-backend=cpu", TORCH]
    subprocess.run(uv, check=True)
