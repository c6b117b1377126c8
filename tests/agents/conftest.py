"""Needs the SDKs of agents: `make test-agents` runs these tests in an environment that has them."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("openai") and find_spec("anthropic") else ["test_*.py"]
