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
from millrace.api.python_rows import as_lines, check_column, read_rows
from millrace.config.carried import PICKLE, name_of, store
from millrace.config.foreign import OURS
from millrace.config.load import Source, combine, merge, read_file, read_mapping, validate
from millrace.config.schema import Config
from millrace.config.tables.reward_limits import RewardLimits
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError
from millrace.rewards.function import accepted_columns
from millrace.rewards.signatures import Kind

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
        table = _sum(value) if isinstance(value, list) else _function(value)
        table = read_mapping(Config, {name: table}, "keyword").tree[name]
        tree = merge(Config, tree, {name: table | _kept(tree, name, table["kind"])})
    functions: list[tuple[Any, Kind]] = []
    for name in named:
        if name in tree:
            tree[name] = _carry_functions(name, tree[name], files, functions)
    checked = validate(Config, tree, base.origins | above.origins)
    if rows is not None:
        for function, signature in functions:
            accepted_columns(_called(function), function, signature, rows[0])
    return PreparedConfig(checked, files)


def _function(value: Any) -> dict[str, Any]:
    return {"kind": "function", "path": value}


def _sum(rewards: list[Any]) -> dict[str, Any]:
    """A list of rewards as a table: each is a function, the name of a kind, one of these with its weight, or
    a table as of `reward.members`. A member without a name has that of its function or kind."""
    members = []
    for one in rewards:
        reward, weight = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        member = dict(one) if isinstance(one, Mapping) else {"weight": weight, "reward": reward}
        if callable(reward := member.get("reward")):
            member["reward"] = _function(reward)
        if "name" not in member and (callable(reward) or isinstance(reward, str)):
            member["name"] = _called(reward).lower()
        members.append(member)
    return {"kind": "sum", "members": members}


def _called(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _carry_functions(
    name: str, value: Any, files: dict[str, bytes], functions: list[tuple[Any, Kind]]
) -> Any:
    """The table with the path of a file for each function; the reward functions join `functions`."""
    if isinstance(value, list):
        return [_carry_functions(name, inner, files, functions) for inner in value]
    if not isinstance(value, dict):
        return value
    table = {key: _carry_functions(name, inner, files, functions) for key, inner in value.items()}
    thing = table.get("path")
    if table.get("kind") == "function" and (callable(thing) or isinstance(thing, Algorithm)):
        data = pickled(name, thing)
        table["path"] = path = name_of(name, PICKLE, data)
        files[path] = data
        if name == "reward":
            functions.append((thing, table.get("signature", "millrace")))
    return table


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


def _kept(tree: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    """The keys of the table that stay when a function, or a sum, takes its place: all that any kind has, and
    of a function those of a table without another kind."""
    table = tree.get(name) or {}
    kept = {"reward": (*RewardLimits.model_fields,), "schedule": ("staleness_max",)}.get(name, ())
    if name == "reward" and kind == "function" == table.get("kind", kind):
        kept += ("signature", "attempts", "backoff_s")
    return {key: value for key, value in table.items() if key in kept}


def _check_object(name: str, value: Any) -> None:
    match name:
        case "reward" if not callable(value) and not isinstance(value, list):
            wanted = "a function `reward(completion, answer, **columns)`, a list of rewards"
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
