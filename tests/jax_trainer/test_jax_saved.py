"""Checkpoints of the trainer in JAX: complete or absent, exact, for other devices too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_presets import make_policy
from trainer_doubles import make_batch

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.errors import DataError, StorageError
from millrace.trainer.files.directories import sweep
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.files import checkpoint
from millrace_jax.files.checkpoint import JaxSaver, load_checkpoint, named_arrays
from millrace_jax.policy import JaxPolicy


def fresh(path: Path, algorithm: Any = None, mesh: Any = None) -> JaxPolicy:
    path.mkdir(exist_ok=True)
    return make_policy(path, build(algorithm or PolicyGradient()), mesh=mesh)


def trained(path: Path, steps: int = 1, algorithm: Any = None) -> JaxPolicy:
    policy = fresh(path, algorithm)
    for version in range(steps):
        policy.step(make_batch(version), rejected_dir=path)
    return policy


def save(policy: JaxPolicy, directory: Path) -> Path:
    saver = JaxSaver()
    saver.begin(policy, directory)
    return Path(saver.result().path)


def numbers(policy: JaxPolicy) -> dict[str, Any]:
    return {name: np.array(x) for name, x in named_arrays(policy.state).items()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", [PolicyGradient(), PolicyGradient(kind="ppo")])
def test_a_policy_goes_on_from_its_checkpoint_bit_for_bit(algorithm: Any, tmp_path: Path) -> None:
    policy = trained(tmp_path, 2, algorithm)
    path = save(policy, tmp_path / "saved")
    assert path.name == "v00000002"
    loaded = fresh(tmp_path, algorithm)
    load_checkpoint(loaded, path)
    assert loaded.version == 2 and equal(numbers(loaded), numbers(policy))
    for each in (policy, loaded):
        each.step(make_batch(2), rejected_dir=tmp_path)
    assert equal(numbers(loaded), numbers(policy))


def test_steps_during_a_save_do_not_change_what_is_saved(tmp_path: Path) -> None:
    policy, saver = trained(tmp_path), JaxSaver()
    policy.before_update = saver.wait_read
    due = numbers(policy)
    saver.begin(policy, tmp_path / "saved")
    for version in (1, 2):
        policy.step(make_batch(version), rejected_dir=tmp_path)
    info = saver.result()
    assert info.version == 1 and 0 <= info.stall_s <= info.save_s
    loaded = fresh(tmp_path)
    load_checkpoint(loaded, info.path)
    assert equal(numbers(loaded), due)


def test_an_update_waits_until_the_state_is_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, saver, order = trained(tmp_path), JaxSaver(), list[str]()
    policy.before_update = lambda: (saver.wait_read(), order.append("update"))[0]
    written = checkpoint._write_arrays

    def late(path: Path, arrays: Any, on_host: Any, *rest: Any) -> None:
        time.sleep(0.2)
        written(path, arrays, lambda: (order.append("on the host"), on_host()), *rest)

    monkeypatch.setattr(checkpoint, "_write_arrays", late)
    saver.begin(policy, tmp_path / "saved")
    policy.step(make_batch(1), rejected_dir=tmp_path)
    saver.result()
    assert order == ["on the host", "update"]


def test_a_failed_save_leaves_the_old_checkpoint_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(tmp_path)
    path = save(policy, tmp_path / "saved")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space"):
        patch.setattr(checkpoint, "_write_arrays", full)
        save(policy, tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == [path]
    load_checkpoint(fresh(tmp_path), path)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip, lambda file: os.truncate(file, file.stat().st_size // 2), Path.unlink]
)
def test_a_damaged_file_is_named_and_nothing_is_loaded(damage: Any, tmp_path: Path) -> None:
    path = save(trained(tmp_path), tmp_path / "saved")
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    damage(largest)
    policy = fresh(tmp_path)
    due = numbers(policy)
    with pytest.raises(DataError, match=f"{largest.name} is damaged"):
        load_checkpoint(policy, path)
    assert policy.version == 0 and equal(numbers(policy), due)


def test_a_checkpoint_of_another_model_or_trainer_is_refused(tmp_path: Path) -> None:
    path = save(trained(tmp_path, algorithm=PolicyGradient(kind="ppo")), tmp_path / "saved")
    with pytest.raises(DataError, match=r"of another model: tensors .*'head/bias'"):
        load_checkpoint(fresh(tmp_path), path)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"jax 1"', "1"))
    with pytest.raises(DataError, match=r"format 1, this trainer reads 'jax 1'(.|\n)*millrace convert"):
        load_checkpoint(fresh(tmp_path), path)


def test_a_process_killed_while_it_saves_leaves_no_checkpoint(tmp_path: Path) -> None:
    """It is killed as soon as Orbax has files of the next checkpoint, and once more at the digests."""
    older = save(trained(tmp_path), tmp_path / "saved")
    for at in ("_write_arrays", "describe"):
        program = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from millrace_jax.devices.mesh import make_mesh
from millrace_jax.files import checkpoint
from test_jax_saved import save, trained
whole = checkpoint.{at}
def killed(*args):
    if {at!r} == "describe": os.kill(os.getpid(), signal.SIGKILL)
    whole(*args[:2], lambda: os.kill(os.getpid(), signal.SIGKILL), *args[3:])
checkpoint.{at} = killed
save(trained(Path({str(tmp_path)!r}), 2), Path({str(tmp_path / "saved")!r}))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert [path.name for path in (tmp_path / "saved").glob("v*")] == [older.name]
        assert [path.name for path in sweep(tmp_path / "saved")] == [".v00000002.building"]
        assert list((tmp_path / "saved").iterdir()) == [older]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
def test_a_checkpoint_is_restored_onto_other_devices(tmp_path: Path) -> None:
    two = make_mesh(2, 1, 1, jax.devices()[:2])
    policy, loaded = trained(tmp_path), fresh(tmp_path, mesh=two)
    places = jax.tree.map(lambda x: x.sharding, loaded.state)
    load_checkpoint(loaded, save(policy, tmp_path / "whole"))
    assert equal(numbers(loaded), numbers(policy))
    assert jax.tree.map(lambda x: x.sharding, loaded.state) == places
    whole = fresh(tmp_path)
    load_checkpoint(whole, save(loaded, tmp_path / "divided"))
    assert equal(numbers(whole), numbers(policy))
