"""Names of other frameworks get ours as the suggestion, and what a page promises of them is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.api.configure import Components, prepare
from millrace.config.foreign import FOREIGN, OURS
from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.config.tree import leaves
from millrace.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
KEYS = {key for key, _, _ in leaves(Config)}
BASE = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "x"}, "reward": {"kind": "gym"}}


def test_every_key_that_is_suggested_exists() -> None:
    assert set(FOREIGN) <= KEYS
    assert len(OURS) == sum(map(len, FOREIGN.values()))  # no name twice
    assert not OURS.keys() & set(Config.model_fields)


@pytest.mark.parametrize(
    ("table", "name", "ours"),
    [
        (None, "learning_rate", "optimizer.lr"),
        (None, "num_generations", "batch.group_size"),
        (None, "batch_size", "batch.prompts"),
        (None, "max_completion_length", "sampling.max_tokens"),
        ("batch", "ppo_mini_batch_size", "batch.prompts"),
        ("rollout", "n", "batch.group_size"),
        ("optimizer", "max_grad_norm", "optimizer.grad_clip"),
    ],
)
def test_another_frameworks_name_is_answered_with_ours(table: str | None, name: str, ours: str) -> None:
    tree = BASE | ({table: {name: 1}} if table else {name: 1})
    with pytest.raises(ConfigError, match=rf"unknown key `[\w.]*{name}`.*\n  The key here is `{ours}`"):
        validate(Config, tree, {})


def test_python_keywords_of_other_frameworks_are_answered_too() -> None:
    with pytest.raises(ConfigError, match=r"The key here is `optimizer=\{'lr': \.\.\.\}`"):
        prepare(BASE, Components(), {"learning_rate": 1e-5}, ())


def test_the_page_names_only_keys_that_exist_and_names_that_are_answered() -> None:
    keys = PAGE.read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in keys if line.startswith("| `")]
    assert len(rows) > 20
    for ours, *theirs, _ in rows:
        key = ours.strip().strip("`")
        assert key in KEYS
        for name in re.findall(r"`([^`]+)`", " ".join(theirs)):
            last = name.rpartition(".")[2]
            known = OURS.get(last) in {key, "batch.group_size"}
            assert known or any(leaf.rpartition(".")[2] == last for leaf in KEYS), name
