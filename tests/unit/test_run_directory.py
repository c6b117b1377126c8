"""Where a run is kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ledger_records import make_group

from millrace.config.schema import Config
from millrace.core import model_version
from millrace.core.errors import ConfigError, DataError
from millrace.ledger.sqlite import SqliteLedger
from millrace.run_directory.models import is_finished
from millrace.run_directory.run_directory import RunDirectory, create, find, reopen


def config() -> Config:
    tree = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    return Config.model_validate(tree)


def test_a_new_run_is_named_after_its_configuration_and_numbered(tmp_path: Path) -> None:
    first, second = create("tiny", None, runs=tmp_path / "runs"), create("tiny", None, runs=tmp_path / "runs")
    assert first.path.name.startswith("tiny-")
    assert first.path.name.endswith("-1")
    assert second.path.name.endswith("-2")


def test_a_run_directory_is_its_owners_only(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    for run in (create("a", None, runs=tmp_path / "runs"), create("a", tmp_path / "there")):
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_a_directory_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--resume"):
        create("a", tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        create("a", tmp_path / "file")


def barren_run(path: Path) -> RunDirectory:
    run = create("a", path)
    run.write_config(config())
    run.events.write_text("")
    run.logs.mkdir()
    SqliteLedger(run.ledger, run={}).close()
    return run


def test_a_run_that_never_admitted_a_group_makes_room_for_the_next_try(tmp_path: Path) -> None:
    run = barren_run(tmp_path / "run")
    assert create("a", run.path) == run
    assert os.listdir(run.path) == []


def test_a_run_with_a_group_or_a_foreign_file_or_an_owner_is_left_alone(tmp_path: Path) -> None:
    (barren_run(tmp_path / "foreign").path / "thesis.tex").write_text("x")
    admitted = SqliteLedger(barren_run(tmp_path / "admitted").ledger, run={})
    admitted.admit([make_group(0)])
    admitted.flush()
    admitted.close()
    owner = SqliteLedger(barren_run(tmp_path / "owned").ledger, run={})
    for name in ("foreign", "admitted", "owned"):
        with pytest.raises(ConfigError, match="is not empty"):
            create("a", tmp_path / name)
        assert (tmp_path / name / "ledger.sqlite").exists()
    owner.close()


def test_the_newest_run_of_the_name_is_resumed(tmp_path: Path) -> None:
    runs = [create("a", None, runs=tmp_path) for _ in range(3)]
    create("b", None, runs=tmp_path).write_config(config())
    for age, run in enumerate(runs):
        run.write_config(config())
        os.utime(run.config, (1000 - age, 1000 - age))
    assert reopen("a", None, runs=tmp_path) == runs[0]
    assert reopen("a", runs[2].path) == runs[2]


def test_a_directory_of_runs_stands_for_its_newest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory and holds none"):
        find(tmp_path)
    older, newer = (create(name, None, runs=tmp_path) for name in "ab")
    for run, written_s in ((older, 1000), (newer, 2000)):
        run.write_config(config())
        os.utime(run.config, (written_s, written_s))
    assert find(tmp_path) == newer
    assert find(older.path) == older


def test_a_directory_that_never_became_a_run_is_not_resumed(tmp_path: Path) -> None:
    create("a", None, runs=tmp_path)
    with pytest.raises(ConfigError, match="no run of 'a'"):
        reopen("a", None, runs=tmp_path)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        reopen("a", tmp_path / "elsewhere")


def test_the_configuration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = create("a", tmp_path / "run")
    run.write_config(config())
    assert run.read_config() == config()
    assert os.listdir(run.path) == ["config.json"]


def test_a_directory_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = create("a", tmp_path / "run")
    with pytest.raises(DataError, match="is no run directory"):
        run.read_config()
    with pytest.raises(DataError, match="is no run directory"):
        RunDirectory(tmp_path / "file").read_config()
    run.config.write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        run.read_config()


def test_a_model_in_the_place_of_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    with pytest.raises(DataError, match="is a model, and no run: give the directory of a run"):
        find(tmp_path).read_config()


def test_a_run_is_finished_when_its_exported_model_has_a_tokenizer(tmp_path: Path) -> None:
    run = create("done", tmp_path / "run")
    SqliteLedger(run.ledger, run={}).close()
    run.model.mkdir()
    for path in (run.summary, run.model / "config.json"):
        path.write_text("{}")
    model_version.write(run.model, 0)
    assert not is_finished(run, 0)
    (run.model / "tokenizer.json").write_text("{}")
    assert is_finished(run, 0)


def test_a_run_whose_exported_model_is_of_another_version_is_not_finished(tmp_path: Path) -> None:
    run = create("done", tmp_path / "run")
    SqliteLedger(run.ledger, run={}).close()
    run.model.mkdir()
    for path in (run.summary, run.model / "config.json", run.model / "tokenizer.json"):
        path.write_text("{}")
    assert not is_finished(run, 0)
    model_version.write(run.model, 4)
    assert not is_finished(run, 0)


def test_evaluations_of_undone_versions_are_forgotten(tmp_path: Path) -> None:
    run = create("undone", tmp_path / "run")
    run.forget_evaluations(after=2)
    lines = [f'{{"version": {version}}}\n' for version in (4, 2, 3)]
    run.evaluations.write_text("".join(lines))
    run.forget_evaluations(after=2)
    assert run.evaluations.read_text() == lines[1]
    run.evaluations.write_text("{")
    with pytest.raises(DataError, match=r"evaluations\.jsonl.*a line is damaged"):
        run.forget_evaluations(after=2)


LINKS = ["events.jsonl", "config.json.partial", "checkpoints", "logs/trainer.1.log", "wandb", "wandb/latest"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_with_a_link_that_leads_out_of_it_is_not_resumed(tmp_path: Path, name: str) -> None:
    run = create("strange", tmp_path / "run")
    run.write_config(config())
    (tmp_path / "outside").mkdir()
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link to .*outside"):
        reopen("strange", run.path)


def test_the_link_of_an_earlier_session_of_wandb_to_its_log_does_not_end_a_run(tmp_path: Path) -> None:
    run = create("tracked", tmp_path / "run")
    run.write_config(config())
    link = run.path / "wandb" / "offline-run-1" / "logs" / "debug-core.log"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside")
    assert reopen("tracked", run.path) == run


def test_a_link_within_a_run_is_nobody_s_harm(tmp_path: Path) -> None:
    run = create("own", tmp_path / "run")
    run.write_config(config())
    (run.path / "latest").symlink_to("events.jsonl")
    assert reopen("own", run.path) == run


@pytest.mark.parametrize("name", ["ledger.sqlite", "events.jsonl", "logs/replica-0.1.log"])
def test_a_copy_made_of_hard_links_would_write_into_the_first_run(tmp_path: Path, name: str) -> None:
    run = create("copied", tmp_path / "run")
    run.write_config(config())
    run.logs.mkdir()
    (run.path / name).write_text("kept")
    os.link(run.path / name, tmp_path / "another-name")
    with pytest.raises(ConfigError, match=f"{name} has 2 names .hard links."):
        reopen("copied", run.path)


def test_a_checkpoint_may_be_shared_with_another_directory(tmp_path: Path) -> None:
    run = create("shared", tmp_path / "run")
    run.write_config(config())
    run.checkpoints.mkdir()
    (run.checkpoints / "weights").write_text("kept")
    os.link(run.checkpoints / "weights", tmp_path / "another-name")
    assert reopen("shared", run.path) == run
