"""Which model of a run is meant, and of which version it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config.schema import Config
from millrace.core import model_version
from millrace.core.errors import DataError
from millrace.run_directory.models import CHECKPOINT, export, newest, origin
from millrace.run_directory.run_directory import RunDirectory


def save(run: RunDirectory, version: int) -> Path:
    checkpoint = run.checkpoints / f"v{version:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / CHECKPOINT).touch()
    return checkpoint


def end(run: RunDirectory, version: int) -> Path:
    run.model.mkdir()
    (run.model / "config.json").touch()
    model_version.write(run.model, version)
    return run.model


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    run = RunDirectory((tmp_path / "run").resolve())
    run.ledger.touch()
    return run


def test_a_run_without_a_checkpoint_has_no_model(run: RunDirectory) -> None:
    with pytest.raises(DataError, match="no model yet"):
        newest(run.path)


def test_the_model_of_an_end_is_taken_until_a_resumed_run_saves_a_later_one(run: RunDirectory) -> None:
    first = save(run, 2)
    assert newest(run.path) == first
    save(run, 4)
    model = end(run, 4)
    assert (newest(run.path), newest(model)) == (model, model)
    assert origin(model) == (run, 4)
    later = save(run, 6)
    assert newest(run.path) == later
    assert (origin(later), origin(model)) == ((run, 6), (run, 4))


def test_a_model_that_no_run_made_has_no_origin(run: RunDirectory, tmp_path: Path) -> None:
    assert newest(tmp_path) == tmp_path
    assert origin(tmp_path) is None
    model_version.write(tmp_path, 3)
    assert origin(tmp_path) is None
    assert origin(run.path / "start") is None


def test_the_start_model_that_a_checkpoint_needs_is_named_where_it_is_gone(run: RunDirectory) -> None:
    gone = run.path / "gone"
    tables = {"model": {"path": str(gone)}, "task": {"kind": "gym", "name": "chain_sum"}}
    run.write_config(Config.model_validate(tables | {"reward": {"kind": "gym"}}))
    save(run, 2)
    with pytest.raises(DataError, match=rf"began with is not at `model.path` \({gone}\) any more"):
        export(run)
    assert not run.exported(2).exists()
