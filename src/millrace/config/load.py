"""Defaults < a TOML file < `--set key=value`: merged, validated and frozen, once.

Rules that are ours and not TOML's:
- a union's table may be written as its kind alone: `schedule = "areal"`;
- a `kind` that differs from the one below replaces the whole table, so a preset is switched by
  changing one key, and the file may still have keys of the old preset;
- `"none"` means off wherever a key admits None (TOML has no null);
- paths are relative to the file that writes them; those of `--set` to the working directory.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from millrace.config.carried import is_carried_object
from millrace.config.problems import describe
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.config.toml_text import key_lines, mistake
from millrace.config.tree import Tree, admits_none, default_kind, leaves, listed_table, union_kinds
from millrace.core.errors import ConfigError

PATH_KEYS = (
    "model.path",
    "model.out",
    "task.path",
    "reward.path",
    "reward.agent.function",
    "data.path",
    "algorithm.path",
    "algorithm.teacher",
    "schedule.path",
    "rollout.shared_dir",
    "rollout.draft_model",
    "lengths.run",
)
MODULE = re.compile(r"[\w.]+:\w+")  # an object in an installed package
OWN = re.compile(r"(.*\.py):(\w+)")  # an object in a file

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Source:
    """One layer of configuration, and the place of each of its keys."""

    tree: Tree
    origins: dict[str, str]


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a run's configuration.

    Args:
        file       TOML
        overrides  `key.sub=value`: the value is read as TOML, or else as a plain string
    Raises:
        ConfigError: names every problem with its key, value, file and line, and what to do.
    """
    return load_as(Config, file, overrides)


def load_as(schema: type[S], file: Path, overrides: Sequence[str] = ()) -> S:
    """`load` for any schema."""
    return combine(schema, read_file(schema, file), read_overrides(schema, overrides, Path.cwd()))


def combine(schema: type[S], below: Source, above: Source) -> S:
    """Two layers, merged and frozen."""
    return validate(schema, merge(schema, below.tree, above.tree), below.origins | above.origins)


def validate(schema: type[S], tree: Tree, origins: dict[str, str]) -> S:
    """Freeze a merged tree. Strict: `"4"` is no number and `true` is not 1."""
    complete = _with_default_kinds(schema, tree)
    try:
        return schema.model_validate_json(json.dumps(complete, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(describe(schema, error, origins)) from None


def read_file(schema: type[Section], path: Path) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        problem, line = mistake(text, error)
        raise ConfigError(f"{problem}   [{path}:{line}]") from None
    origins = {key: f"{path}:{line}" for key, line in key_lines(text).items()}
    return Source(_normal(schema, tree, path.absolute().parent), origins)


def read_mapping(
    schema: type[Section], mapping: Mapping[str, Any], origin: str, base: Path | None = None
) -> Source:
    """Keys and values from Python. A name with dots is a key of a table; a table may be a mapping.

    `origin` is named in errors in place of a file and its line. Paths are relative to `base`, by default the
    working directory.
    """
    tree: Tree = {}
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} cannot be a key of a configuration: it must be text")
        _put(tree, name.split("."), _over(_at(tree, name), _plain(value)))
    origins = {name: origin for name in tree}
    return Source(_normal(schema, tree, base or Path.cwd()), origins)


def _at(tree: Tree, key: str) -> Any:
    """The value at a dotted key; None: there is none."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_unset=True) | (
            {"kind": value.kind} if hasattr(value, "kind") else {}
        )
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_overrides(schema: type[Section], overrides: Sequence[str], base: Path) -> Source:
    tree: Tree = {}
    origins: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise ConfigError(
                f"`--set {override}` must have the form key=value or table.key=value.\n"
                f"  Write --set {key.strip(' .') or 'KEY'}={text or 'VALUE'}"
            )
        field, value = schema.model_fields.get(names[0]), parse_value(text.strip())
        kind_alone = len(names) == 1 and not isinstance(value, dict)
        if kind_alone and field is not None and union_kinds(field):
            names.append("kind")
        _put(tree, names, value)
        origins[".".join(names)] = f"--set {override}"
    return Source(_normal(schema, tree, base), origins)


def parse_value(text: str) -> Any:
    """A TOML value; text that is not one is a plain string."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if len(tree) == 1 else text


def merge(schema: type[Section], below: Tree, above: Tree) -> Tree:
    """`above` over `below`, table by table; another `kind` replaces the table."""
    merged = dict(below)
    for name, value in above.items():
        field = schema.model_fields.get(name)
        old = merged.get(name)
        fallback = default_kind(field) if field is not None and union_kinds(field) else None
        merged[name] = value if _other_kind(old, value, fallback) else _over(old, value)
    return merged


def _other_kind(old: Any, value: Any, fallback: str | None) -> bool:
    if not isinstance(old, dict) or not isinstance(value, dict) or "kind" not in value:
        return False
    return bool(value["kind"] != old.get("kind", fallback))


def _over(old: Any, value: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(value, dict):
        return value
    return old | {key: _over(old.get(key), inner) for key, inner in value.items()}


def _put(tree: Tree, names: list[str], value: Any) -> None:
    for name in names[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"`--set`: `{name}` is both a value ({inner!r}) and a table")
        tree = inner
    tree[names[-1]] = value


def _normal(schema: type[Section], tree: Tree, base: Path, prefix: str = "") -> Tree:
    """Kinds written alone become tables, `"none"` becomes None, paths become absolute."""
    normal: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            normal[name] = _normal(schema, value, base, f"{prefix}{name}.")
        elif isinstance(value, list) and (section := _listed(schema, prefix + name)):
            normal[name] = [
                _normal(section, each, base) if isinstance(each, dict) else each for each in value
            ]
        elif isinstance(value, str):
            normal[name] = _normal_text(schema, prefix + name, value, base)
        else:
            normal[name] = value
    return normal


def _listed(schema: type[Section], key: str) -> type[Section] | None:
    """The section of each table of the list `key`, which may stand in a table."""
    return next((table for leaf, _, f in leaves(schema) if leaf == key and (table := listed_table(f))), None)


def _normal_text(schema: type[Section], key: str, value: str, base: Path) -> Any:
    field = schema.model_fields.get(key)
    if value == "none" and field is not None and admits_none(field):
        return None
    if field is not None and union_kinds(field):
        return {"kind": value}
    if value == "none" and any(admits_none(f) for leaf, _, f in leaves(schema) if leaf == key):
        return None
    if key in PATH_KEYS and is_carried_object(value):
        raise ConfigError(
            f"`{key}` ({value!r}) is a pickle, and only `millrace.train` may name one.\n"
            "  Name the function itself: file.py:name, or package.module:name"
        )
    if key in PATH_KEYS and value:
        return _absolute(value, base)
    return value


def _absolute(value: str, base: Path) -> str:
    """Resolve a path, or the file part of `file.py:name`; `package.module:name` stays as it is."""
    if own := OWN.fullmatch(value):
        return f"{_absolute(own[1], base)}:{own[2]}"
    if MODULE.fullmatch(value):
        return value
    return str((base / Path(value).expanduser()).resolve())


def _with_default_kinds(schema: type[Section], tree: Tree) -> Tree:
    complete = dict(tree)
    for name, field in schema.model_fields.items():
        value = tree.get(name)
        if union_kinds(field) and isinstance(value, dict) and "kind" not in value and default_kind(field):
            complete[name] = {"kind": default_kind(field), **value}
    return complete
