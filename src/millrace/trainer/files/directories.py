"""Directories that are complete or do not exist, even if a process dies while their files are written.

All ranks of a trainer fill the directory under another name. Then it is synced to disk and renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.core.errors import DataError, writing
from millrace.trainer.ranks.mesh import ALONE, Ranks, all_or_none


@contextmanager
def atomic_directory(target: Path, *, marker: str, ranks: Ranks = ALONE) -> Iterator[Path]:
    """A directory to fill, which appears as `target`, on disk, when the block ends without an error on any
    rank.

    All of `ranks` fill the directory. It replaces an older directory of its kind, which has the file
    `marker`.

    Raises:
        DataError: `target` is something else, which is left alone.
        StorageError: the disk is full, read-only or failing, on this rank or another. After any error an
            older `target` is unchanged.
    """
    path, first = building(target), ranks.rank == 0
    try:
        with all_or_none(ranks), writing(target):
            if first:
                _refuse_another_kind(target, marker)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
        with all_or_none(ranks), writing(target):
            yield path
            for file in path.rglob("*"):
                _sync(file)
        with all_or_none(ranks), writing(target):
            if first:
                _put_in_place(path, target)
    finally:
        if first:
            shutil.rmtree(path, ignore_errors=True)


def building(target: Path) -> Path:
    """The directory that becomes `target`."""
    return target.with_name(f".{target.name}.building")


def _refuse_another_kind(target: Path, marker: str) -> None:
    if target.exists() and not (target / marker).is_file() and any(target.iterdir()):
        raise DataError(f"{target} will not be overwritten: it holds files but no {marker}. Choose another")


def _put_in_place(path: Path, target: Path) -> None:
    _sync(path)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    path.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: str | Path) -> list[Path]:
    """Repair `directory` after a process died while it filled or replaced a directory in it.

    A half-filled directory is removed. A replaced directory whose successor never came is put back. Returns
    the leftovers. No other process may write there meanwhile.
    """
    leftovers = sorted(p for end in ("building", "replaced") for p in Path(directory).glob(f".*.{end}"))
    for path in leftovers:
        target = path.with_name(path.name[1 : -len(path.suffix)])
        if path.is_symlink() or not path.is_dir():
            continue
        if path.suffix == ".replaced" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)
    return leftovers


def prune_checkpoints(
    directory: str | Path, *, newest: int, keep: int, spared: Collection[int] = ()
) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to version `newest`, and the checkpoints of versions
    `spared`. Returns the removed directories.

    At least two stay: the ledger may not have the newest yet, and then resumes from the checkpoint before.
    """
    there = (
        path for path in Path(directory).glob(f"v{'[0-9]' * 8}") if path.is_dir() and not path.is_symlink()
    )
    saved = sorted(path for path in there if int(path.name[1:]) <= newest)
    removed = [path for path in saved[: -max(keep, 2)] if int(path.name[1:]) not in spared]
    for path in removed:
        shutil.rmtree(path)
    return removed
