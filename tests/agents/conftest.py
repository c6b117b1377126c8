"""Needs what agents use: each file of tests runs in an environment that has its packages, and no other."""

from __future__ import annotations

import string
from importlib.util import find_spec
from pathlib import Path

import pytest

from millrace.conversations.tokenizer import make_character_tokenizer

NEEDS = {
    "test_sdk_conformance.py": ("openai", "anthropic", "agents"),  # make test-agents
    "test_mcp_agent.py": ("openai", "mcp", "agents"),
    "test_other_agents.py": (
        "inspect_ai",
        "langchain_openai",
        "minisweagent",
        "pydantic_ai",
        "smolagents",
    ),
    "test_skyrl_gym.py": ("skyrl_gym",),
    "test_textarena.py": ("textarena",),
    "test_verifiers.py": ("verifiers.v1.agent",),  # make test-verifiers
    "test_verifiers_v0.py": ("verifiers.legacy",),
}


def _is_missing(name: str) -> bool:
    return bool(find_spec(name.partition(".")[0])) is False or find_spec(name) is None


collect_ignore = [file for file, names in NEEDS.items() if any(map(_is_missing, names))]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer that has a token for each character."""
    directory = tmp_path_factory.mktemp("model")
    make_character_tokenizer(directory, string.printable)
    return directory
