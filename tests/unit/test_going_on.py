"""From which run and version a new run begins, and what it keeps of that."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from trainer_doubles import make_batch, make_trainer, save_checkpoint, tiny_model, weights_of

from millrace.api import train as script
from millrace.api import work
from millrace.api.configure import PreparedConfig
from millrace.cli import train as command_line
from millrace.config.load import validate
from millrace.config.schema import Config
from millrace.config.tables.training import Optimizer
from millrace.core import model_version
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Batch
from millrace.ledger.sqlite import SqliteLedger
from millrace.run.going_on import Start, begun_as, find_start, start_in, with_model
from millrace.run_directory.models import served_config
from millrace.run_directory.run_directory import START, RunDirectory, create, moments_of, read_parent
from millrace.trainer.files.checkpoint_manifest import JAX, TORCH, CheckpointManifest, write_manifest
from millrace.trainer.files.moments import keep_moments, take_moments
from millrace_sweeps.checking import begin_trial, start_of
from millrace_sweeps.trial_record import SweepTrial, Trials

VERSIONS = (2, 4)


def config_of(model: Path, **sections: Any) -> Config:
    tree = {"model": {"path": str(model)}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    return validate(Config, tree | sections, {})


def make_run(path: Path, *versions: int, kind: int | str = TORCH, **sections: Any) -> RunDirectory:
    path.mkdir(parents=True)
    (path.parent / "start").mkdir(exist_ok=True)
    (path.parent / "start" / "config.json").write_text("{}")
    run = RunDirectory(path.resolve())
    SqliteLedger(run.ledger, run={"id": f"{path.name}-id"}).close()
    run.write_config(config_of(path.parent / "start", **sections))
    for version in versions:
        run.checkpoint(version).mkdir(parents=True)
        write_manifest(run.checkpoint(version), CheckpointManifest(kind, version, {}))
    return run


def end(run: RunDirectory, version: int) -> Path:
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    model_version.write(run.model, version)
    return run.model


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "run", *VERSIONS)


def test_a_run_means_its_newest_checkpoint_and_a_version_may_be_named(run: RunDirectory) -> None:
    assert find_start(run.path) == Start(run, run.checkpoint(4), 4)
    assert find_start(f"{run.path}@2") == Start(run, run.checkpoint(2), 2)
    assert find_start(run.checkpoint(2), moments=True) == Start(run, run.checkpoint(2), 2, True)
    assert find_start(run.path.parent) == find_start(run.path)  # the newest of a directory of runs


def test_the_model_of_an_end_is_the_start_only_where_its_checkpoint_is_gone(run: RunDirectory) -> None:
    model = end(run, 4)
    assert find_start(run.path).source == run.checkpoint(4)
    (run.checkpoint(4) / "manifest.json").unlink()
    run.checkpoint(4).rmdir()
    assert find_start(run.path) == find_start(f"{run.path}@4") == Start(run, model, 4)


def test_a_name_with_an_at_sign_is_a_path_first(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "lr@2", 4), make_run(tmp_path / "lr", 2)
    assert find_start(tmp_path / "lr@2").run == run
    assert find_start(f"{tmp_path / 'lr@2'}@4") == Start(run, run.checkpoint(4), 4)
    assert find_start(other.checkpoint(2)).version == 2
    odd = make_run(tmp_path / "me@home", 2)
    assert find_start(odd.path).run == odd


def test_a_start_that_is_none_is_told(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no checkpoint of version 3: it keeps 2, 4"):
        find_start(f"{run.path}@3")
    with pytest.raises(DataError, match="has no checkpoint: it keeps none yet"):
        find_start(make_run(tmp_path / "young").path)
    with pytest.raises(DataError, match="is no run: it has no ledger"):
        find_start(tmp_path / "start")
    with pytest.raises(DataError, match="is no run directory and holds none"):
        find_start(tmp_path / "nowhere@2")


def test_a_model_path_may_be_a_run_or_a_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    assert start_in(config_of(run.path)) == find_start(run.path)
    assert start_in(config_of(run.checkpoint(2))) == find_start(f"{run.path}@2")
    assert start_in(config_of(tmp_path / "start")) is None
    checked = find_start(run.path).fitted(config_of(run.path, steps=7))
    assert (checked.model.path, checked.steps) == (str(tmp_path / "start"), 7)


def test_a_parent_whose_own_start_is_gone_is_told(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "start" / "config.json").unlink()
    with pytest.raises(DataError, match=r"the start of .*run is gone"):
        find_start(run.path).fitted(config_of(run.path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({}, {"optimizer": {"rule": "muon"}}, "`optimizer.rule` is 'adamw' there, and 'muon' here"),
        ({"optimizer": {"states": "8bit"}}, {}, "`optimizer.states` is '8bit' there"),
        ({"adapter": {"rank": 4}}, {"adapter": {"rank": 8}}, "`adapter.rank` (4 there, 8 here)"),
        ({"adapter": {"rank": 4}}, {"adapter": {"rank": 4}}, "has the adapter merged"),
        ({}, {"trainer": {"backend": "jax"}}, "`trainer.backend`"),
        ({"kind": JAX}, {}, "`trainer.backend`"),
    ],
)
def test_moments_that_cannot_be_taken_are_refused_by_name(
    old: dict[str, Any], new: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", 2, **old)
    config = config_of(tmp_path / "start", **new)
    with pytest.raises(ConfigError, match=r"moments of .* cannot be taken") as caught:
        find_start(run.path, moments=True).fitted(config)
    assert message in str(caught.value)
    assert find_start(run.path).fitted(config).model.path == str(tmp_path / "start")


def test_moments_of_a_run_that_keeps_a_model_alone_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    end(run, 4)
    with pytest.raises(ConfigError, match="it keeps no checkpoint of version 4"):
        find_start(run.path, moments=True).fitted(config_of(tmp_path / "start"))


def test_a_new_run_has_all_that_it_needs_and_knows_its_ancestors(tmp_path: Path) -> None:
    """Also functions that the parent carries, which the new configuration names."""
    parent = make_run(tmp_path / "parent")
    parent.carried.mkdir()
    (parent.carried / "rows-0.jsonl").write_text("{}\n")
    (parent.carried / "other-0.jsonl").write_text("{}\n")
    end(parent, 4)
    child, grandchild = (RunDirectory(tmp_path / name) for name in ("child", "grandchild"))
    for old, new in ((parent, child), (child, grandchild)):
        start = find_start(old.path)
        new.path.mkdir()
        start.write(new)
        task = {"kind": "file", "path": str(old.carried / "rows-0.jsonl")}
        new.write_config(start.own(config_of(start.model, task=task, reward={"kind": "exact"}), new))
        SqliteLedger(new.ledger, run={"id": f"{new.path.name}-id"}).close()
        end(new, 9)
    moved = RunDirectory(grandchild.path.rename(tmp_path / "moved"))
    config = moved.read_config()
    assert config.model.path == str(moved.path / START)
    assert Path(config.model.path, "config.json").is_file()
    assert config.task.path == str(moved.carried / "rows-0.jsonl")
    assert Path(config.task.path).is_file() and not (moved.carried / "other-0.jsonl").exists()
    assert model_version.read(moved.path / START) == 0  # of the new run
    lineage = read_parent(moved)
    assert lineage is not None and lineage.parent is not None
    assert (lineage.run, lineage.version, lineage.path) == ("child-id", 9, str(child.path))
    assert str(lineage) == "version 9 of child; that from version 4 of parent"
    assert read_parent(parent) is None
    assert moments_of(moved, config) is None


def test_a_start_that_cannot_be_written_leaves_no_directory(run: RunDirectory, tmp_path: Path) -> None:
    new = RunDirectory(tmp_path / "new")
    new.path.mkdir()
    with pytest.raises(DataError, match="is damaged"):  # a manifest without files
        find_start(run.path).write(new)
    assert not new.path.exists()
    new.path.mkdir()
    start = find_start(run.path)
    (run.checkpoint(4) / "manifest.json").unlink()
    run.checkpoint(4).rmdir()
    with pytest.raises(DataError, match="was deleted meanwhile"):
        start.write(new)


def test_each_function_of_a_list_of_rewards_goes_along(tmp_path: Path) -> None:
    parent, child = make_run(tmp_path / "parent"), RunDirectory(tmp_path / "child")
    end(parent, 4)
    parent.carried.mkdir()
    child.path.mkdir()
    members = []
    for name in ("reward-1.pickle", "reward-2.pickle"):
        (parent.carried / name).write_text(name)
        function = {"kind": "function", "path": str(parent.carried / name)}
        members.append({"name": f"member{len(members)}", "reward": function})
    start = find_start(parent.path)
    start.write(child)
    config = start.own(config_of(start.model, reward={"kind": "sum", "members": members}), child)
    assert config.reward.kind == "sum"
    own = [Path(member.reward.path) for member in config.reward.members if member.reward.kind == "function"]
    assert own == [child.carried / "reward-1.pickle", child.carried / "reward-2.pickle"]
    assert [path.read_text() for path in own] == ["reward-1.pickle", "reward-2.pickle"]


def test_a_checkpoint_that_is_deleted_after_the_check_is_told_and_nothing_stays(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "check", lambda *_: shutil.rmtree(run.checkpoint(4)))
    monkeypatch.setattr(script, "ask", lambda name, arguments: work.WORKS[name](**arguments))
    prepared = PreparedConfig(config_of(run.path))
    with pytest.raises(DataError, match="was deleted meanwhile"):
        script._begin(prepared, find_start(run.path), "new", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["ask", "own"])
def test_an_interrupt_while_a_script_writes_the_start_leaves_no_directory(
    place: str, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("check", "ask"):
        monkeypatch.setattr(script, name, lambda *_: None)
    monkeypatch.setattr(*(script, "ask") if place == "ask" else (Start, "own"), interrupt)
    prepared = PreparedConfig(config_of(run.path), {"carried/rows-0.jsonl": b"{}"})
    with pytest.raises(KeyboardInterrupt):
        script._begin(prepared, find_start(run.path), "new", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_directory_whose_start_was_half_written_is_used_again(tmp_path: Path) -> None:
    new = create("new", tmp_path / "new")
    (new.path / START).mkdir(parents=True)
    (new.path / START / "model.safetensors").write_bytes(b"half")
    new.parent.write_text("{")
    Path(f"{new.ledger}.lock").write_text("")
    assert create("new", new.path) == new
    assert list(new.path.iterdir()) == []


@pytest.mark.parametrize(
    "others", [["logs"], ["parent.json"], ["carried", "model"], ["carried", "notes.txt"]]
)
def test_a_directory_that_may_be_another_s_is_left_alone(others: list[str], tmp_path: Path) -> None:
    for name in others:
        (tmp_path / "new" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not empty"):
        create("new", tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == others


def test_a_start_that_another_process_writes_is_left_alone(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = create("new", tmp_path / "new")

    def meanwhile(*_: Any) -> None:
        with pytest.raises(ConfigError, match="is not empty"):
            create("new", new.path)

    monkeypatch.setattr(Start, "_write", meanwhile)
    find_start(run.path).write(new)
    assert new.carried.is_dir() and not new.is_owned()


def test_the_command_keeps_the_configuration_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = make_run(tmp_path / "parent")
    end(parent, 4)

    def killed(*_: Any) -> bool:
        assert (tmp_path / "new" / "config.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_check", lambda *_: None)
    monkeypatch.setattr(command_line, "_train", killed)
    with pytest.raises(KeyboardInterrupt):
        command_line.command(None, begin=str(parent.path), run_dir=tmp_path / "new")
    kept = RunDirectory((tmp_path / "new").resolve())
    assert kept.read_config().model.path == str(kept.path / START)


def test_a_damaged_record_of_the_parent_is_told(run: RunDirectory) -> None:
    run.parent.write_text('{"run": 3}')
    with pytest.raises(DataError, match=r"parent.json is damaged"):
        read_parent(run)


def test_another_model_keeps_every_other_key(tmp_path: Path) -> None:
    config = config_of(tmp_path, seed=5, optimizer={"lr": 1e-3})
    other = with_model(config, tmp_path / "other")
    assert (other.seed, other.optimizer, other.model.path) == (5, config.optimizer, str(tmp_path / "other"))


def test_a_command_that_only_reads_a_model_gets_the_newest_of_a_run(
    run: RunDirectory, tmp_path: Path
) -> None:
    model = end(run, 4)
    plain = config_of(tmp_path / "start")
    for config, named, chosen in (
        (config_of(run.path), None, model),
        (plain, run.path, model),
        (plain, None, tmp_path / "start"),
    ):
        with served_config(config, named) as (served, of):
            assert (served.model.path, of) == (str(chosen.resolve()), chosen)


# ---------------------------------------------------------------- trials of a sweep


def begun(sweep: Path, name: str, parent: RunDirectory, version: int) -> RunDirectory:
    """A trial that has the start of a version."""
    trial = RunDirectory((sweep / name).resolve())
    (trial.path / START).mkdir(parents=True)
    start = Start(parent, parent.checkpoint(version), version)
    trial.parent.write_bytes(msgspec.json.encode(start.parent()))
    return trial


def trials_of(**overrides: dict[str, Any]) -> Trials:
    return Trials("reward/mean", "max", True, {name: SweepTrial(keys) for name, keys in overrides.items()})


def test_trials_that_name_the_same_run_begin_with_one_version(run: RunDirectory, tmp_path: Path) -> None:
    config, new = config_of(run.path), RunDirectory(tmp_path / "sweep" / "b")
    trials = trials_of(a={"seed": 1}, b={"seed": 2})
    assert start_of(config, new, trials) == find_start(run.path)
    begun(tmp_path / "sweep", "a", run, 2)
    assert start_of(config, new, trials) == find_start(f"{run.path}@2")  # the run has trained on
    checkpoint = config_of(run.checkpoint(4))
    assert start_of(checkpoint, new, trials) == find_start(run.checkpoint(4))
    other = trials_of(a={"model.path": str(run.checkpoint(2))}, b={"model.path": str(run.path)})
    assert start_of(config, new, other) == find_start(run.path)


def test_a_trial_goes_on_with_its_start_also_where_the_parent_is_gone(
    run: RunDirectory, tmp_path: Path
) -> None:
    trial = begun(tmp_path, "a", run, 2)
    shutil.rmtree(run.path)
    for named in (run.path, run.checkpoint(2)):
        assert begun_as(config_of(named), trial).model.path == str(trial.path / START)
    for other in (run.checkpoint(4), tmp_path / "start"):
        assert begun_as(config_of(other), trial).model.path == str(other)


def test_a_trial_whose_start_cannot_be_written_leaves_no_directory(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = RunDirectory((tmp_path / "sweep" / "a").resolve())
    (trial.path / START).mkdir(parents=True)
    (trial.path / START / "model.safetensors").write_bytes(b"half")  # of a sweep that was killed

    def fails(*_: Any) -> None:
        assert not (trial.path / START).exists()
        raise DataError("was deleted meanwhile")

    monkeypatch.setattr(script, "ask", fails)
    with pytest.raises(DataError, match="was deleted meanwhile"):
        begin_trial(PreparedConfig(config_of(run.path), {}), trial, trials_of(a={}))
    assert not trial.path.exists()


# ---------------------------------------------------------------- the optimizer


def earlier(batch: Batch, by: int) -> Batch:
    """The batch as of a run that began `by` versions later."""

    def renumbered(columns: TokenColumns) -> TokenColumns:
        versions = [max(0, version - by) for version in columns.versions()]
        return TokenColumns.of(columns.tokens, columns.logprobs, versions)

    groups = [
        msgspec.structs.replace(
            group,
            sequences=[msgspec.structs.replace(s, columns=renumbered(s.columns)) for s in group.sequences],
        )
        for group in batch.groups
    ]
    return Batch(batch.version - by, groups)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_the_first_step_with_moments_is_the_parents_next_step_bit_for_bit(rule: str, tmp_path: Path) -> None:
    optimizer = Optimizer(lr=1e-3, rule=rule, grad_clip=None)
    parent = make_trainer(optimizer=optimizer)
    for version in range(2):
        parent.step(make_batch(version), rejected_dir=tmp_path)
    kept = keep_moments(save_checkpoint(parent, tmp_path / "checkpoints"), tmp_path / "moments")
    with_moments, without = (make_trainer(optimizer=optimizer, model=tiny_model(seed=9)) for _ in range(2))
    for child in (with_moments, without):
        child.model.load_state_dict(parent.model.state_dict())
    take_moments(with_moments, kept)
    assert with_moments.version == 0
    parent.step(make_batch(2), rejected_dir=tmp_path)
    for child in (with_moments, without):
        child.step(earlier(make_batch(2), 2), rejected_dir=tmp_path)
    assert all(map(torch.equal, weights_of(with_moments), weights_of(parent)))
    assert not all(map(torch.equal, weights_of(without), weights_of(parent)))


def test_moments_of_another_model_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    parent = make_trainer()
    parent.step(make_batch(0), rejected_dir=tmp_path)
    kept = keep_moments(save_checkpoint(parent, tmp_path / "checkpoints"), tmp_path / "moments")
    with pytest.raises(DataError, match="is of another model"):
        take_moments(make_trainer(model=tiny_model("qwen2")), kept)
    file = kept / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()  # it may be the parent's file under another name
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"optimizer.safetensors is damaged"):
        take_moments(make_trainer(), kept)
