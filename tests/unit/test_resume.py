"""Which keys may change when a run is resumed."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from millrace.config.load import load
from millrace.config.schema import Config
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tree import leaves
from millrace.core.errors import ConfigError
from millrace.run.resume import FREE_ON_RESUME, check_resume, diff

BASE = '[model]\npath = "m"\n[task]\nkind = "gym"\nname = "gcd"\n[reward]\nkind = "gym"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(BASE)
    return tmp_path / "run.toml"


def test_an_unchanged_configuration_has_no_difference(path: Path) -> None:
    assert diff(load(path), load(path)) == []


def test_how_far_where_and_how_watched_may_change(path: Path) -> None:
    overrides = ["steps=500", "rollout.replicas=4", "supervision.heartbeat_timeout_s=9", "observe.wandb=p"]
    changes = check_resume(load(path), load(path, overrides))
    assert [change.key for change in changes] == [
        "steps", "rollout.replicas", "supervision.heartbeat_timeout_s", "observe.wandb",
    ]  # fmt: skip
    assert all(change.allowed for change in changes)


@pytest.mark.parametrize("hosts", ["runtime.hosts=3", "rollout.packed=true", "runtime.kind=ray"])
def test_on_which_hosts_it_runs_may_change(path: Path, hosts: str) -> None:
    at = ["runtime.kind=ray", "runtime.address=10.0.0.1:6379"]
    for old, new in (
        ([], [hosts]),
        ([hosts], []),
        (at, ["runtime.kind=ray", "runtime.address=10.0.0.2:6379"]),
    ):
        changes = check_resume(load(path, old), load(path, new))
        assert changes and all(change.allowed for change in changes)


def test_what_the_gradient_depends_on_may_not_and_is_told_key_by_key(path: Path) -> None:
    new = load(path, ["seed=1", "steps=500", "batch.prompts=4", "schedule=areal"])
    with pytest.raises(ConfigError) as caught:
        check_resume(load(path), new)
    said = str(caught.value)
    assert "`seed`: 0 -> 1" in said
    assert "`batch.prompts`: 8 -> 4" in said
    assert "`schedule.kind`: 'millrace' -> 'areal'" in said
    assert "`schedule.eta`: (not there) -> 4" in said
    assert "steps" not in said


def test_every_rule_matches_a_key_of_the_schema() -> None:
    keys = [key for key, _, _ in leaves(Config)]
    keys += [f"evaluations.one.{key}" for key in EvaluationSection.model_fields]
    for pattern in FREE_ON_RESUME:
        assert any(fnmatchcase(key, pattern) for key in keys), pattern


def test_what_comes_of_rounding_otherwise_from_here_on_is_told(path: Path) -> None:
    (change,) = check_resume(load(path, ["rollout.exact=true"]), load(path))
    assert "tokens sampled from now on may differ" in change.allowed
