"""The files that a path of a task names: one file, the files of a directory, or those of a pattern."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path

from millrace.core.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
OTHER_NAMES = {".pq": ".parquet", ".parq": ".parquet", ".feather": ".arrow", ".ipc": ".arrow"}
ABOUT = ("dataset_infos.json",)
"""Files about a data set, without rows of it."""
_PACKED = {
    b"\x1f\x8b": "packed with gzip",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"PK\x03\x04": "an archive (zip), as spreadsheets are",
    b"version https://git-lfs": "a pointer of Git LFS: `git lfs pull` fetches the file",
    b"<!DOCTYPE": "a page of HTML",
    b"<html": "a page of HTML",
}
_PACKERS = (".gz", ".bz2", ".xz", ".zst", ".zip")
SAVED = ("dataset_dict.json", "dataset_info.json")
"""A directory with one of these was written by `datasets.save_to_disk`, and is read whole."""


def format_of(file: Path) -> str:
    """The suffix that names the format. Capital letters and other usual suffixes mean the same."""
    suffix = file.suffix.lower()
    return OTHER_NAMES.get(suffix, suffix)


def refuse_packed(file: Path) -> None:
    """Raises: DataError: the bytes are of no format of rows, whatever the name of the file says."""
    if not file.is_file():
        raise DataError(f"{file} is no regular file: write the rows into one")
    with file.open("rb") as opened:
        begin = opened.read(32)
    for magic, what in _PACKED.items():
        if begin.startswith(magic):
            raise DataError(f"{file} is {what}. Rows are read from plain files: put one in its place")


def _has_rows(file: Path) -> bool:
    """By its name, also if it must be unpacked first."""
    plain = Path(file.stem) if file.suffix.lower() in _PACKERS else file
    return format_of(plain) in SUFFIXES and file.name not in ABOUT


def is_pattern(path: str) -> bool:
    """Whether the path is a pattern. A file that exists under this very name is none."""
    return glob.has_magic(path) and not os.path.exists(path)


def is_saved(path: Path) -> bool:
    return any((path / name).exists() for name in SAVED)


def check_exists(path: str) -> None:
    """Raises: DataError: there is nothing under the path, and it is no pattern."""
    if Path(path).exists() or is_pattern(path):
        return
    owner, name = Path(path).parent.name or "OWNER", Path(path).name
    hub = (
        ""
        if Path(name).suffix
        else f'.\n  A data set of a hub is {{ kind = "hub", name = "{owner}/{name}" }}'
    )
    raise DataError(f"no data at `{path}` (looked in {Path.cwd()}): check `task.path`{hub}")


def row_files(path: str) -> list[Path]:
    """The files of rows, sorted by name.

    Raises: DataError: there are none, or a directory has files of several formats.
    """
    if is_pattern(path):
        files = sorted({Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name)})
        if not files:
            raise DataError(f"no file fits the pattern `{path}`: check `task.path`")
        return files
    if not Path(path).is_dir() or is_saved(Path(path)):
        return [Path(path)]
    visible = (file for file in Path(path).rglob("*") if not _hidden(file.relative_to(path)))
    files = sorted(file for file in visible if _has_rows(file) and file.is_file())
    suffixes = sorted({format_of(file) for file in files})
    if not files:
        raise DataError(f"{path} is not a data set that can be read: it has no file of {', '.join(SUFFIXES)}")
    if len(suffixes) > 1:
        count = Counter(file.suffix for file in files)
        most = max(count, key=lambda one: (count[one], one != ".json"))  # which often is about a data set
        raise DataError(
            f"{path} has files of several formats ({', '.join(suffixes)}): name those with rows by a "
            f"pattern, `task.path` = {str(Path(path) / '**' / f'*{most}')!r}"
        )
    return files


def named_files(path: str) -> list[Path]:
    """Every file that decides the rows, for digests. Empty: there is none."""
    if Path(path).is_dir():
        return [file for file in Path(path).rglob("*") if file.is_file()]
    return row_files(path) if is_pattern(path) else [Path(path)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
