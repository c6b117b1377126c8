"""A script's functions and rows, kept in the run's directory.

`millrace.train` pickles a function into `RUN/carried/NAME-DIGEST.pickle`, because the run's processes
cannot import the script or notebook that defines it. Unpickling runs code. So a carried object is loaded only
from a directory of that name which nobody else can write into. Its bytes must have the digest that the
configuration names. A configuration file cannot name one.

`config.json` names carried files relative to the run directory. So the directory may be moved. The same holds
of the start that a run took from another run (`run_directory.run_directory`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.core import files
from millrace.core.errors import ConfigError, writing

DIRECTORY = "carried"
PICKLE = ".pickle"

Tree = dict[str, Any]


def is_carried(path: str) -> bool:
    """Whether a path names a carried file of a run's directory. The file need not exist yet."""
    return path.startswith(DIRECTORY + os.sep)


def is_carried_object(path: str) -> bool:
    return path.endswith(PICKLE)


def name_of(what: str, suffix: str, data: bytes) -> str:
    """The path of `data` relative to its run's directory. The path contains the digest."""
    return f"{DIRECTORY}/{what}-{digest(data)}{suffix}"


def store(directory: Path, contents: dict[str, bytes]) -> None:
    """Write files of such names into a run's directory. Raises: StorageError."""
    for name, data in contents.items():
        path = directory / name
        with writing(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(data)


def digest(data: bytes) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal. Nobody can construct other bytes with the same digest."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def pack(body: bytes) -> bytes:
    """A pickle, with the directories from which its process imports modules."""
    return pickle.dumps(([str(Path(entry).resolve()) for entry in sys.path], body))


def load_carried(key: str, path: str) -> Any:
    """The object in a file that `store` wrote from `pack`.

    Raises: ConfigError: the file is not there, not the one that was written, or not only ours to write;
        or a module that the object needs cannot be imported.
    """
    file = Path(path)
    data = _trusted(key, file)
    paths, body = pickle.loads(data)
    sys.path += [entry for entry in paths if entry not in sys.path and os.path.isdir(entry)]
    try:
        return pickle.loads(body)
    except Exception as error:
        raise ConfigError(
            f"`{key}`: what {file.name} carries cannot be loaded here: {type(error).__name__}: {error}.\n"
            "  The modules that it imports must still be where they were"
        ) from error


def _trusted(key: str, file: Path) -> bytes:
    if file.parent.name != DIRECTORY:
        raise ConfigError(f"`{key}` ({file}) names a pickle outside of a run's directory `{DIRECTORY}`")
    try:
        for place in (file, file.parent):
            if files.others_may_write(place):
                raise ConfigError(
                    f"`{key}`: {place} belongs to another user, or others may write it.\n"
                    "  Loading it would run code. If it is yours: chmod go-w, chown"
                )
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{key}` ({file}) cannot be read: {error.strerror}") from None
    if not file.stem.endswith(f"-{digest(data)}"):
        raise ConfigError(f"`{key}`: {file} is not what the run wrote there: its digest differs")
    return data


# ---------------------------------------------------------------- paths in the record


def relative(tree: Tree, directory: Path) -> Tree:
    """A dumped configuration with carried files named relative to the run directory."""
    folder = str(directory / DIRECTORY) + os.sep
    changed: Tree = _with_paths(tree, lambda path: DIRECTORY + os.sep + path[len(folder) :], folder)
    return changed


def absolute(tree: Tree, directory: Path) -> Tree:
    """The reverse of `relative`."""
    changed: Tree = _with_paths(tree, lambda path: str(directory.absolute() / path), DIRECTORY + os.sep)
    return changed


def named(value: Any) -> Iterator[str]:
    """Each carried file that a tree of `relative` names, in its tables and in lists of tables."""
    if isinstance(value, list):
        for inner in value:
            yield from named(inner)
    elif isinstance(value, dict):
        if isinstance(path := value.get("path"), str) and is_carried(path):
            yield path
        yield from named(list(value.values()))


def _with_paths(value: Any, change: Callable[[str], str], prefix: str) -> Any:
    """The value with each such `path` changed, in its tables and in lists of tables."""
    if isinstance(value, list):
        return [_with_paths(inner, change, prefix) for inner in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _with_paths(inner, change, prefix) for name, inner in value.items()}
    if isinstance(path := value.get("path"), str) and path.startswith(prefix):
        changed["path"] = change(path)
    return changed
