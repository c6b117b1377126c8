"""Makes a checked configuration from a script's arguments: a dict, file or Config, keywords, functions,
rows."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millrace.algorithms.build import Algorithm
from millrace.api.pickling import pickled
from millrace.api.rows import as_lines, check_column, read_rows
from millrace.config.carried import PICKLE, name_of, store
from millrace.config.foreign import OURS
from millrace.config.load import Source, combine, merge, read_file, read_mapping, validate
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError
from millrace.environments.function import accepted

S = TypeVar("S", bound=Section)

ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | Section | None
Base = ConfigLike | Source
"""A layer that is read already is a base too."""


@dataclass(frozen=True)
class Components:
    """The functions and rows that a script passes. None: the configuration has a table for the component."""

    reward: Any = None
    rows: Any = None
    algorithm: Any = None
    schedule: Any = None


@dataclass
class PreparedConfig:
    """A configuration, and the files that the configuration names relative to the run's directory."""

    config: Config
    files: dict[str, bytes] = field(default_factory=dict)

    def place(self, directory: Path) -> None:
        """Write the files into the run's directory."""
        store(directory, self.files)


def configure(schema: type[S], config: ConfigLike, keywords: Mapping[str, Any], own: Iterable[str]) -> S:
    """A checked configuration of any schema; `own` are the other keywords of the calling function."""
    _refuse_unknown(schema, keywords, own)
    return combine(schema, _base(schema, config), read_mapping(schema, keywords, "keyword"))


def prepare(
    config: Base, components: Components, keywords: Mapping[str, Any], own: Iterable[str]
) -> PreparedConfig:
    """A run's configuration, with functions pickled and rows as JSON, in memory.

    Raises: ConfigError, DataError, RewardError: an argument is wrong. Nothing was written or started.
    """
    _refuse_unknown(Config, keywords, own)
    base = _base(Config, config)
    named = {"reward": components.reward, "algorithm": components.algorithm, "schedule": components.schedule}
    plain = {name: value for name, value in named.items() if isinstance(value, str | Mapping | Section)}
    objects = {name: value for name, value in named.items() if value is not None and name not in plain}
    above = read_mapping(Config, {**keywords, **plain}, "keyword")
    rows = None if components.rows is None else read_rows(components.rows)
    if rows is not None:  # a table of another kind in `config` does not concern these rows
        above.tree["task"] = {"kind": "file"} | above.tree.get("task", {})
    tree, files = merge(Config, base.tree, above.tree), dict[str, bytes]()
    if rows is not None:
        _carry_rows(tree, files, rows)
    for name, value in objects.items():
        _check_object(name, value)
        data = pickled(name, value)
        path = name_of(name, PICKLE, data)
        files[path] = data
        tree = merge(Config, tree, {name: {"kind": "function", "path": path} | _limits(tree, name)})
    checked = validate(Config, tree, base.origins | above.origins)
    if components.reward in objects.values() and rows is not None:
        accepted(getattr(components.reward, "__qualname__", "reward"), components.reward, rows[0])
    return PreparedConfig(checked, files)


def _base(schema: type[Section], config: Base) -> Source:
    match config:
        case Source():
            return config
        case None:
            return Source({}, {})
        case Section():
            return Source(config.model_dump(mode="json"), {})
        case Mapping():
            return read_mapping(schema, config, "config")
        case str() | os.PathLike():
            return read_file(schema, Path(config))
    raise ConfigError(f"`config` must be a path, a dict or a millrace.Config, not a {type(config).__name__}")


def _refuse_unknown(schema: type[Section], keywords: Mapping[str, Any], own: Iterable[str]) -> None:
    known = [*own, *schema.model_fields]
    for keyword in keywords:
        if keyword.partition(".")[0] not in known:
            near = difflib.get_close_matches(keyword, known, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"The keywords are {', '.join(known)}"
            if schema is Config and keyword in OURS:
                table, _, key = OURS[keyword].rpartition(".")
                ours = f"{table}={{{key!r}: ...}}" if table else f"{key}=..."
                hint = f"The key here is `{ours}`: docs/glossary.md has other frameworks' names"
            raise ConfigError(f"unknown keyword `{keyword}`.\n  {hint}")


def _carry_rows(tree: dict[str, Any], files: dict[str, bytes], rows: list[dict[str, Any]]) -> None:
    """Make the task a file of these rows. If no row has an answer, the task has none."""
    task = dict(tree["task"])
    check_column(rows, "task.prompt", task.get("prompt", "prompt"))
    if "answer" not in task and not any(row.get("answer") is not None for row in rows):
        task["answer"] = None
    elif task.get("answer", "answer") is not None:
        check_column(rows, "task.answer", task.get("answer", "answer"))
    data = as_lines(rows)
    path = name_of("rows", ".jsonl", data)
    files[path] = data
    tree["task"] = task | {"path": path}


def _limits(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The keys of the table that a function has too."""
    limits = ("timeout_s", "memory_mb", "workers", "workers_max")
    kept = {"reward": limits, "schedule": ("staleness_max",)}.get(name, ())
    return {key: value for key, value in (tree.get(name) or {}).items() if key in kept}


def _check_object(name: str, value: Any) -> None:
    match name:
        case "reward" if not callable(value):
            wanted = "a function `reward(completion, answer, **columns)`"
        case "schedule" if not callable(value):
            wanted = "a function of the configuration that returns a millrace.schedule.Schedule"
        case "algorithm" if not isinstance(value, Algorithm):
            wanted = "a millrace.algorithms.Algorithm"
        case _:
            return
    raise ConfigError(
        f"`{name}` ({value!r}) must be {wanted}, the name of a kind, or a dict with its keys; "
        f"it is of type {type(value).__name__}"
    )
