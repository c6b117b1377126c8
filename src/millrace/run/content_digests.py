"""Digests of the files that a run learns from: its model, its teacher and its data.

A run records the digests when it begins. A resumed run may repeat steps from the start weights, and read rows
again by number. So it goes on with the same files or not at all. Of files with functions of the user it says
that they are others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import xxhash

from millrace.config.freeze import recorded as tree_of
from millrace.config.schema import Config
from millrace.core.errors import DataError
from millrace.run.resume import flat
from millrace.tasks.data_files import named_files
from millrace.tasks.hub import fetched_file

MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Weights, configuration and tokenizer. Other files of the directory are not read."""

EVALUATIONS = "evaluations."
_READ_BYTES = 1 << 20
_MISSING = "(not there)"


def content_digests(config: Config) -> dict[str, str]:
    """XXH3-128 of each file, by its key and its path below it. Reads every byte, 0.5 s a GB.

    A task of a gym, or of a function, has no file of its own.

    Raises: DataError: a file cannot be read.
    """
    models = {"model.path": config.model.path, "algorithm.teacher": config.teacher}
    files = {
        f"{key}: {path.name}": path
        for key, directory in models.items()
        if directory is not None
        for kind in MODEL_FILES
        for path in Path(directory).glob(kind)
    }
    tasks = {f"task.parts.{name}." if name else "": part.task for name, part in config.by_part.items()} | {
        f"{EVALUATIONS}{evaluation.name}.": evaluation.task
        for evaluation in config.evaluations
        if evaluation.task is not None
    }
    for prefix, task in tasks.items():
        if task.kind == "file":
            above = Path(task.path).parent
            files |= {f"{prefix}task.path: {os.path.relpath(p, above)}": p for p in named_files(task.path)}
        elif task.kind == "hub":
            files[f"{prefix}task.name: {task.name}"] = fetched_file(task)
    return {name: _digest(path) for name, path in sorted(files.items())}


def refuse_other_content(recorded: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raises: DataError naming each file that has changed since the run began. An evaluation may be added or
    removed later."""
    wrong = [
        f"  {name}: {recorded.get(name, _MISSING)} -> {current.get(name, _MISSING)}"
        for name in sorted(recorded.keys() | current.keys())
        if recorded.get(name) != current.get(name)
        and not (name.startswith(EVALUATIONS) and (name in recorded) != (name in current))
    ]
    if wrong:
        raise DataError(
            "these files have changed since the run began (digests of their content):\n"
            + "\n".join(wrong)
            + "\n  Put them back, or start a new run: a resumed run goes on with the same model and data"
        )


def refuse_other_start(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """What a run recorded when it began, and what it would record now. An older run may lack a value.

    Raises: DataError: its files, or the hash seed of its workers, are others.
    """
    refuse_other_content(recorded.get("content", {}), current["content"])
    before, now = recorded.get("hash_seed"), current["hash_seed"]
    if before not in (None, now):
        raise DataError(
            f"the workers of this run had PYTHONHASHSEED={before}, and now they would have "
            f"PYTHONHASHSEED={now}: rows that depend on the order of a set would be other rows\n"
            "  Go on with the Millrace that began the run, or start a new run"
        )


def source_digests(config: Config) -> dict[str, str]:
    """XXH3-128 of each file here that a key names a function of. What the file imports is not read."""
    paths = {key: path for key, path in flat(tree_of(config)) if key.endswith(".path")}
    files = {key: _source(path) for key, path in paths.items()}
    return {key: _digest(file) for key, file in files.items() if file is not None and file.is_file()}


def _source(path: str) -> Path | None:
    """The file of `file.py:name` or `package.module:name`. Nothing is imported."""
    source, origin, places = path.rpartition(":")[0], None, None
    if source.endswith(".py"):
        return Path(source)
    for part in source.split("."):
        spec = PathFinder.find_spec(part, places) if part else None
        if spec is None:
            return None
        origin, places = spec.origin if spec.has_location else None, spec.submodule_search_locations or []
    return Path(origin) if origin else None


def other_sources(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key with a file that has changed since the run began, and a sentence."""
    before, now = recorded.get("sources", {}), current["sources"]
    for key in sorted(before.keys() & now.keys()):
        digests = f"digests {before[key]} -> {now[key]}"
        if before[key] != now[key]:
            yield key, f"its file has changed since the run began ({digests}): later steps are by other code"


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                state.update(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return state.hexdigest()
