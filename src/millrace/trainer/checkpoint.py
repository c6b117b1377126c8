"""A training checkpoint: a directory that is there completely or not at all.

Written under another name, synced to disk, then renamed. `manifest.json` holds the version and the
size and digest of every other file, so that a damaged checkpoint is refused, not trained from.

    v00000012/
      manifest.json
      model.safetensors      float32 master weights
      optimizer.safetensors  `{state}/{parameter}` per tensor
      rng.safetensors        torch's generators
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from millrace.core.errors import DataError, boundary, writing
from millrace.trainer.model import named_weights, not_finite
from millrace.trainer.trainer import PolicyTrainer

FORMAT = 1
FILES = {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}
READ_BYTES = 1 << 22
_EARLIER = (
    "  Delete this directory, then `millrace train --resume`: the run goes back to the checkpoint before it "
    "(or to the start) and does the steps since then again"
)


class _File(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: str  # XXH3-128


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    version: int
    files: dict[str, _File]


def save_checkpoint(trainer: PolicyTrainer, directory: str | Path) -> Path:
    """Save everything that the next step depends on as `directory`/v{version:08d}, atomically.

    One of the same version is replaced: it is of an earlier lineage.
    """
    target = Path(directory) / _name(trainer.version)
    with atomic_directory(target, marker="manifest.json") as path:
        weights = {n: t.detach().cpu().contiguous() for n, t in named_weights(trainer.model).items()}
        save_file(weights, path / "model.safetensors")
        save_file(_optimizer_tensors(trainer), path / "optimizer.safetensors")
        save_file(_generators(), path / "rng.safetensors")
        files = {file.name: _describe(file) for file in sorted(path.iterdir())}
        manifest = _Manifest(FORMAT, trainer.version, files)
        (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return target


def load_checkpoint(trainer: PolicyTrainer, path: str | Path) -> None:
    """Restore weights, optimizer, version and generators into `trainer`.

    Raises:
        DataError: it is incomplete or damaged, holds a weight that is not finite, or belongs to another
            model; `trainer` is untouched unless the tensors themselves disagree.
    """
    path = Path(path)
    manifest = _verified(path)
    with boundary("trainer", f"load the checkpoint {path}", DataError):
        weights = load_file(path / "model.safetensors")
        state = load_file(path / "optimizer.safetensors")
        generators = load_file(path / "rng.safetensors")
        _restore_weights(trainer.model, weights, path)
        _restore_optimizer(trainer, state)
        torch.set_rng_state(generators["cpu"])
        if torch.cuda.is_available() and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"])
    trainer.version = manifest.version


def load_weights(model: PreTrainedModel, path: str | Path) -> None:
    """Restore the weights alone, into a model that is not to be trained. Raises: DataError, as above."""
    path = Path(path)
    _verified(path)
    with boundary("export", f"load the checkpoint {path}", DataError):
        _restore_weights(model, load_file(path / "model.safetensors"), path)


def sweep(directory: str | Path) -> list[Path]:
    """Put right what a process left that died while it filled or replaced a directory in `directory`.

    What was half filled is removed. What was set aside for a new one that never came is put back. Returns
    the paths found. Call it only where no other process writes there.
    """
    found = sorted(p for end in ("building", "replaced") for p in Path(directory).glob(f".*.{end}"))
    for path in found:
        target = path.with_name(path.name[1 : -len(path.suffix)])
        if path.is_symlink() or not path.is_dir():
            continue
        if path.suffix == ".replaced" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)
    return found


def prune_checkpoints(directory: str | Path, *, newest: int, keep: int) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to version `newest`, and return what was removed.

    At least two stay: the newest may not be in the ledger yet, which then resumes from the one before.
    """
    saved = sorted(path for path in Path(directory).glob("v????????") if int(path.name[1:]) <= newest)
    removed = saved[: -max(keep, 2)]
    for path in removed:
        shutil.rmtree(path)
    return removed


@contextmanager
def atomic_directory(target: Path, *, marker: str) -> Iterator[Path]:
    """A directory to fill that appears as `target`, on disk, when the block ends without an error.

    It replaces an older one of its kind, which holds the file `marker`.

    Raises:
        DataError: `target` holds something else, which is left alone.
        StorageError: the disk is full, read-only or failing; an older `target` is left as it was.
    """
    if target.exists() and not (target / marker).is_file() and any(target.iterdir()):
        raise DataError(f"{target} will not be overwritten: it holds files but no {marker}. Choose another")
    building = target.with_name(f".{target.name}.building")
    try:
        with _storing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            yield building
            _put_in_place(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, target: Path) -> None:
    for file in building.iterdir():
        _sync(file)
    _sync(building)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    building.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _storing(target: Path) -> Iterator[None]:
    with writing(target):
        try:
            yield
        except SafetensorError as error:  # how safetensors tells of a full disk
            raise OSError(str(error)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(version: int) -> str:
    return f"v{version:08d}"


def _describe(file: Path) -> _File:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
    return _File(file.stat().st_size, digest.hexdigest())


def _verified(path: Path) -> _Manifest:
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a complete checkpoint: its manifest.json: {error}\n{_EARLIER}"
        ) from error
    if manifest.format != FORMAT:
        raise DataError(f"{path} has checkpoint format {manifest.format}, this trainer reads {FORMAT}")
    if path.name != _name(manifest.version) or set(manifest.files) != FILES:
        raise DataError(
            f"{path} is damaged: its manifest.json is of version {manifest.version} and of the files "
            f"{sorted(manifest.files)}, not {sorted(FILES)}.\n{_EARLIER}"
        )
    for name, expected in manifest.files.items():
        file = path / name
        found = _describe(file) if file.is_file() else None
        if found != expected:
            raise DataError(f"{file} is damaged: expected {expected}, found {found}.\n{_EARLIER}")
    return manifest


def _optimizer_tensors(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {
        f"{key}/{name}": value.detach().cpu().contiguous()
        for name, parameter in trainer.model.named_parameters()
        for key, value in trainer.optimizer.state[parameter].items()
    }


def _restore_optimizer(trainer: PolicyTrainer, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(trainer.model.named_parameters())
    trainer.optimizer.state.clear()
    for key_and_name, value in tensors.items():
        key, name = key_and_name.split("/", 1)
        parameter = parameters[name]
        device = value.device if key == "step" and not parameter.is_cuda else parameter.device
        trainer.optimizer.state[parameter][key] = value.to(device)


def _restore_weights(model: PreTrainedModel, saved: dict[str, torch.Tensor], path: Path) -> None:
    if broken := not_finite(saved):
        raise DataError(f"{path} holds weights that are not finite: {broken[:5]}.\n{_EARLIER}")
    present: dict[str, Any] = named_weights(model)
    wrong = sorted(saved.keys() ^ present.keys())
    wrong += sorted(n for n in saved.keys() & present.keys() if saved[n].shape != present[n].shape)
    if wrong:
        raise DataError(f"{path} is of another model: tensors {wrong[:5]} are missing, left over or reshaped")
    with torch.no_grad():
        for name, tensor in saved.items():
            present[name].copy_(tensor)


def _generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
