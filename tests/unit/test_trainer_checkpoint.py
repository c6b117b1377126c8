from __future__ import annotations

import json
from threading import Event

import pytest
import torch
from trainer_doubles import make_batch, make_trainer, save_checkpoint, tiny_model, weights_of

from millrace.core.errors import DataError, StorageError
from millrace.trainer.files import checkpoint
from millrace.trainer.files.checkpoint import Saver, load_checkpoint
from millrace.trainer.files.directories import atomic_directory, prune_checkpoints, sweep
from millrace.trainer.files.tensor_files import fill
from millrace.trainer.model import row_logprobs


def trained(steps, tmp_path, start=0, trainer=None):
    trainer = trainer or make_trainer()
    for version in range(start, steps):
        trainer.step(make_batch(version), rejected_dir=tmp_path)
    return trainer


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    straight = trained(6, tmp_path)
    path = save_checkpoint(trained(3, tmp_path), tmp_path)
    resumed = make_trainer(model=tiny_model(seed=9))
    load_checkpoint(resumed, path)
    assert resumed.version == 3
    trained(6, tmp_path, 3, resumed)
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
def test_a_step_goes_on_while_its_state_is_written_and_its_update_waits(published, tmp_path, monkeypatch):
    """The files have the master weights, also where the step computes with rounded ones meanwhile."""
    trainer, due = (trained(2, tmp_path, trainer=make_trainer(published=published)) for _ in range(2))
    computing, written, updated = Event(), Event(), Event()

    def late_fill(*args):
        assert computing.wait(30.0)
        fill(*args)
        assert not updated.is_set()
        written.set()

    def watched(*args, **kwargs):
        computing.set()
        assert written.wait(30.0)
        return row_logprobs(*args, **kwargs)

    monkeypatch.setattr("millrace.trainer.files.checkpoint.fill", late_fill)
    monkeypatch.setattr("millrace.trainer.trainer.row_logprobs", watched)
    saver = Saver(trainer.optimizer)
    trainer.optimizer.register_step_post_hook(lambda *_: updated.set())
    saver.begin(trainer, tmp_path)
    trained(3, tmp_path, 2, trainer)
    info = saver.result()
    monkeypatch.undo()
    assert (info.version, trainer.version) == (2, 3)
    resumed = make_trainer(model=tiny_model(seed=9), published=published)
    load_checkpoint(resumed, info.path)
    assert all(map(torch.equal, weights_of(resumed), weights_of(due)))
    trained(3, tmp_path, 2, resumed)
    assert all(map(torch.equal, weights_of(resumed), weights_of(trainer)))


def copies_everything(monkeypatch):
    monkeypatch.setattr(checkpoint, "COPIED_BYTES_MIN", 0)
    monkeypatch.setattr(checkpoint, "COPIED_FROM", {"cpu"})


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
def test_no_update_waits_for_the_files_of_a_large_state(published, tmp_path, monkeypatch):
    """It is copied in memory, and the files have the copy: the state before the update."""
    copies_everything(monkeypatch)
    trainer, due = (trained(2, tmp_path, trainer=make_trainer(published=published)) for _ in range(2))
    saver = Saver(trainer.optimizer)
    for version in (2, 3):  # the second one takes the memory of the first
        updated = Event()

        def late_fill(*args, updated=updated):
            assert updated.wait(30.0)
            fill(*args)

        monkeypatch.setattr("millrace.trainer.files.checkpoint.fill", late_fill)
        hook = trainer.optimizer.register_step_post_hook(lambda *_, updated=updated: updated.set())
        saver.begin(trainer, tmp_path)
        trained(version + 1, tmp_path, version, trainer)
        info = saver.result()
        hook.remove()
        resumed = make_trainer(model=tiny_model(seed=9), published=published)
        load_checkpoint(resumed, info.path)
        assert all(map(torch.equal, weights_of(resumed), weights_of(due)))
        trained(version + 1, tmp_path, version, due)


def test_the_memory_of_copies_is_allocated_after_the_first_update_and_suffices(tmp_path, monkeypatch):
    copies_everything(monkeypatch)
    trainer = make_trainer()
    saver = Saver(trainer.optimizer)
    trained(1, tmp_path, trainer=trainer)
    saver._snapshot._reserving.join(30.0)
    memory = saver._snapshot._memory
    assert len(memory)
    trained(2, tmp_path, 1, trainer)
    saver.begin(trainer, tmp_path)
    saver.result()
    assert saver._snapshot._memory is memory


def test_a_trainer_on_a_cpu_makes_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "COPIED_BYTES_MIN", 0)
    trainer = make_trainer()
    saver = Saver(trainer.optimizer)
    trained(1, tmp_path, trainer=trainer)
    saver.begin(trainer, tmp_path)
    saver.result()
    assert not len(saver._snapshot._memory)


def test_a_state_without_room_for_a_copy_is_written_before_the_update_and_that_is_told(
    tmp_path, monkeypatch, caplog
):
    copies_everything(monkeypatch)
    monkeypatch.setattr(checkpoint, "read_memory", lambda: (2000, 1000))
    trainer, order = trained(1, tmp_path), []

    def watched_fill(*args):
        fill(*args)
        order.append("written")

    monkeypatch.setattr("millrace.trainer.files.checkpoint.fill", watched_fill)
    saver = Saver(trainer.optimizer)
    trainer.optimizer.register_step_post_hook(lambda *_: order.append("updated"))
    for version in (1, 2):
        saver.begin(trainer, tmp_path)
        trained(version + 1, tmp_path, version, trainer)
        saver.result()
    assert order == ["written", "updated"] * 2
    assert caplog.text.count("has no room for a copy in memory") == 1


def test_an_update_waits_until_the_state_before_it_is_written(tmp_path, monkeypatch):
    trainer, order, go = trained(1, tmp_path), [], Event()

    def late_fill(*args):
        assert go.wait(30.0)
        fill(*args)
        order.append("written")

    monkeypatch.setattr("millrace.trainer.files.checkpoint.fill", late_fill)
    trainer.optimizer.register_step_pre_hook(lambda *_: go.set())
    saver = Saver(trainer.optimizer)
    trainer.optimizer.register_step_post_hook(lambda *_: order.append("updated"))
    saver.begin(trainer, tmp_path)
    trained(2, tmp_path, 1, trainer)
    assert order == ["written", "updated"]
    assert saver.result().stall_s > 0


def test_a_save_that_fails_holds_up_no_update(tmp_path, monkeypatch):
    trainer = trained(1, tmp_path)
    saver = Saver(trainer.optimizer)
    (tmp_path / "file").touch()
    saver.begin(trainer, tmp_path / "file")
    trained(2, tmp_path, 1, trainer)
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be written"):
            saver.result()


def test_a_large_checkpoint_has_several_files_and_none_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.trainer.files.checkpoint_manifest.FILE_BYTES_MAX", 20_000)
    trainer = trained(1, tmp_path)
    path = save_checkpoint(trainer, tmp_path)
    names = sorted(file.name for file in path.iterdir())
    count = sum(name.startswith("optimizer-") for name in names)
    assert count > 2 and f"optimizer-00001-of-{count:05d}.safetensors" in names
    loaded = make_trainer()
    load_checkpoint(loaded, path)
    assert all(map(torch.equal, weights_of(loaded), weights_of(trainer)))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][f"optimizer-{count:05d}-of-{count:05d}.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"is damaged: its manifest\.json"):
        load_checkpoint(make_trainer(), path)


def test_the_generators_are_restored(tmp_path):
    trainer = make_trainer()
    path = save_checkpoint(trainer, tmp_path)
    expected = torch.rand(3)
    load_checkpoint(trainer, path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(name, damage, tmp_path):
    file = save_checkpoint(trained(1, tmp_path), tmp_path) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flipped" else data[:-7])
    trainer = make_trainer()
    before = weights_of(trainer)
    with pytest.raises(DataError, match=f"{name} is damaged"):
        load_checkpoint(trainer, file.parent)
    for one, other in zip(before, weights_of(trainer), strict=True):
        assert torch.equal(one, other)


def test_a_directory_without_a_readable_manifest_is_no_checkpoint(tmp_path):
    path = save_checkpoint(make_trainer(), tmp_path)
    (path / "manifest.json").write_text(json.dumps({"format": 1})[:-1])
    with pytest.raises(DataError, match="not a complete checkpoint"):
        load_checkpoint(make_trainer(), path)
    with pytest.raises(DataError, match="not a complete checkpoint"):
        load_checkpoint(make_trainer(), tmp_path / "v00000042")


@pytest.mark.parametrize(("written", "changed"), [('"version": 0', '"version": 7'), ('"rng.', '"odd.')])
def test_a_manifest_of_another_version_or_of_other_files_is_refused(written, changed, tmp_path):
    manifest = save_checkpoint(make_trainer(), tmp_path) / "manifest.json"
    whole = manifest.read_text()
    assert written in whole
    manifest.write_text(whole.replace(written, changed))
    with pytest.raises(DataError, match=r"is damaged: its manifest\.json is of (version|the files)"):
        load_checkpoint(make_trainer(), manifest.parent)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = save_checkpoint(make_trainer(), tmp_path)
    with pytest.raises(DataError, match="of another model"):
        load_checkpoint(make_trainer(model=tiny_model("qwen2")), path)


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_debris(tmp_path, monkeypatch):
    trainer = trained(1, tmp_path)
    path = save_checkpoint(trainer, tmp_path / "saved")

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("millrace.trainer.files.checkpoint.describe", full)
        save_checkpoint(trainer, tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == [path]
    load_checkpoint(make_trainer(), path)


def test_saving_a_version_again_replaces_it(tmp_path):
    save_checkpoint(make_trainer(model=tiny_model(seed=1)), tmp_path)
    wanted = make_trainer(model=tiny_model(seed=2))
    path = save_checkpoint(wanted, tmp_path)
    loaded = make_trainer()
    load_checkpoint(loaded, path)
    assert all(map(torch.equal, weights_of(loaded), weights_of(wanted)))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("keep", "left"), [(1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_pruning_keeps_the_last_ones_and_leaves_later_lineages_alone(keep, left, tmp_path):
    for version in (1, 2, 3, 4, 7):
        (tmp_path / f"v{version:08d}").mkdir()
    prune_checkpoints(tmp_path, newest=4, keep=keep)
    assert sorted(int(path.name[1:]) for path in tmp_path.iterdir()) == [*left, 7]


def test_a_directory_of_something_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(DataError, match="will not be overwritten"),
        atomic_directory(tmp_path, marker="config.json"),
    ):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_what_a_dead_trainer_left_half_written_is_swept(tmp_path):
    half = tmp_path / ".v00000003.building"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert sweep(tmp_path) == [half]
    assert not half.exists()


def test_what_a_dead_trainer_had_set_aside_is_put_back_unless_its_successor_is_there(tmp_path):
    path = save_checkpoint(make_trainer(), tmp_path)
    aside = path.with_name(f".{path.name}.replaced")
    path.rename(aside)
    sweep(tmp_path)
    assert (path / "manifest.json").is_file()
    aside.mkdir()
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_sweep_follows_no_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".v00000001.building").symlink_to(elsewhere)
    sweep(tmp_path / "run")
    assert elsewhere.is_dir()


def test_a_checkpoint_with_a_weight_that_is_not_finite_is_refused(tmp_path):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[3, 1] = float("nan")
    path = save_checkpoint(trainer, tmp_path)
    with pytest.raises(DataError, match=r"not finite: \['model.embed_tokens.weight'\]"):
        load_checkpoint(make_trainer(), path)


def test_what_others_put_beside_the_checkpoints_is_left_alone(tmp_path):
    for name in ("vbackup_1", "v0000002x", *(f"v{version:08d}" for version in range(4))):
        (tmp_path / name).mkdir()
    (tmp_path / "v00000000").rmdir()
    (tmp_path / "v00000000").write_text("a file")
    removed = prune_checkpoints(tmp_path, newest=3, keep=2)
    assert [path.name for path in removed] == ["v00000001"]
    assert (tmp_path / "vbackup_1").is_dir() and (tmp_path / "v00000000").is_file()
