"""The optimizer's state of another run's checkpoint, with which a new run begins.

v00000012/             of the parent's version
  manifest.json        of the files here
  optimizer.safetensors
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from millrace.core.errors import DataError, boundary
from millrace.core.supported import DRAFTER
from millrace.trainer.files.checkpoint import restore_optimizer
from millrace.trainer.files.checkpoint_manifest import (
    NAME,
    CheckpointManifest,
    read_manifest,
    refuse_damaged,
    write_manifest,
)
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.tensor_files import open_tensors
from millrace.trainer.ranks.mesh import ALONE, Ranks, all_or_none
from millrace.trainer.trainer import PolicyTrainer
from millrace.trainer.value_head import PREFIX

KIND = "optimizer"


def keep_moments(checkpoint: Path, directory: Path) -> Path:
    """Copy the optimizer's files of `checkpoint` below `directory`. Files of a checkpoint are replaced and
    never written again, so a hard link does as well.

    Raises: DataError: they are damaged. StorageError.
    """
    manifest = read_manifest(checkpoint)
    described = {name: file for name, file in manifest.files.items() if name.startswith(KIND)}
    with atomic_directory(directory / checkpoint.name, marker=NAME) as path:
        for name in described:
            try:
                os.link(checkpoint / name, path / name)
            except OSError:  # another file system
                shutil.copyfile(checkpoint / name, path / name)
        refuse_damaged(path, manifest, list(described))
        write_manifest(path, CheckpointManifest(manifest.format, manifest.version, described))
    return directory / checkpoint.name


def take_moments(trainer: PolicyTrainer, path: Path, ranks: Ranks = ALONE) -> None:
    """Restore the optimizer of `trainer`: the moments, and how many updates made them. Its critic goes on
    too, if both runs have one, and its drafter. A collective call of all `ranks`.

    Raises: DataError: the files are damaged, or of another model.
    """
    manifest = read_manifest(path)
    names = sorted(manifest.files)
    with all_or_none(ranks):
        refuse_damaged(path, manifest, names[ranks.rank :: ranks.world])
    with boundary("trainer", f"take the optimizer's moments in {path}", DataError):
        tensors = open_tensors(path / name for name in names)
        if trainer.value_head is None:
            tensors = {name: tensor for name, tensor in tensors.items() if f"/{PREFIX}" not in name}
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        known = {name.partition("/")[2] for name in tensors}
        known = {name for name in known if not name.startswith((PREFIX, DRAFTER))}
        if known != trained:
            raise DataError(f"{path} is of another model: it has {sorted(known ^ trained)[:4]}, or lacks it")
        restore_optimizer(trainer, tensors)
