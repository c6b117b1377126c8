"""Needs the package `gguf`: `make test-real`."""

from __future__ import annotations

from importlib.util import find_spec

if not find_spec("gguf"):
    collect_ignore_glob = ["test_*.py"]
