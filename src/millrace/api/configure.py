"""Makes a checked configuration from a script's arguments: a dict, file or Config, keywords, functions,
rows. Functions are pickled, or an error names what cannot be. Rows become lines of JSON: a run keeps a
list or a data set in this form. All is checked before there is a run directory.

cloudpickle writes functions of `__main__`, lambdas and closures by value. A function of a module that can be
imported is written by name.
"""

from __future__ import annotations

import difflib
import inspect
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from millrace.algorithms.build import Algorithm
from millrace.api.helper_process import ask, info, warn
from millrace.checks.preflight import preflight
from millrace.config.carried import PICKLE, name_of, pack, store
from millrace.config.foreign import OURS
from millrace.config.inert import inert
from millrace.config.load import Source, combine, merge, read_file, read_mapping, validate
from millrace.config.schema import Config
from millrace.config.tables.reward_kinds import RewardLimits
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError, DataError
from millrace.rewards.function import Kind, accepted_columns
from millrace.run_directory.run_directory import RunDirectory
from millrace.tasks.rows import find_column

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


# ---------------------------------------------------------------- functions


def pickled(name: str, thing: Any) -> bytes:
    """The bytes that `config.carried.load_carried` reads in another process.

    Raises: ConfigError: a variable of `thing` cannot be pickled. The message names the variable and the
    reason.
    """
    try:
        return pack(_dump(thing))
    except Exception as error:
        variable, why = next(_offenders(thing), ("something", _why(None, error)))
        raise ConfigError(
            f"`{name}` ({_kind(thing)}) cannot be carried into the run's processes: {variable} is {why}.\n"
            "  Open, create or load it inside the function (once, in a global variable that starts as None), "
            "or in a module that the function imports"
        ) from None


class _Pickler(cloudpickle.Pickler):
    def persistent_id(self, thing: Any) -> None:
        """Refuse files and device memory. A file would be pickled with its present content, and device memory
        as bytes that load only on such a device. A user expects neither."""
        if _is_on_device(thing) or _is_file(thing):
            raise TypeError(_why(thing, TypeError()))


def _dump(thing: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(thing)
    return stream.getvalue()


def _offenders(thing: Any) -> Iterator[tuple[str, str]]:
    """(variable, reason) of each value of a function or object that cannot be pickled."""
    for name, value in _referred(thing):
        try:
            _dump(value)
        except Exception as error:
            yield f"`{name}`", _why(value, error)


def _referred(thing: Any) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(thing) if callable(thing) else thing
    if inspect.ismethod(function):
        yield from ((f"self.{name}", value) for name, value in vars(function.__self__).items())
        function = function.__func__
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        yield from {**variables.nonlocals, **variables.globals}.items()
        defaults = inspect.signature(function).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)
    else:
        yield from getattr(function, "__dict__", {}).items()


def _why(value: Any, error: Exception) -> str:
    if _is_file(value):
        return f"an open file ({getattr(value, 'name', type(value).__name__)})"
    if type(value).__module__ in ("_thread", "threading"):
        return f"a lock ({type(value).__name__})"
    if _is_on_device(value):
        return f"a tensor on {value.device}; `.cpu()` can be carried"
    said = str(error).removeprefix("cannot pickle ").strip() or type(error).__name__
    return said if value is None else f"of type {type(value).__name__}, which holds what cannot ({said})"


def _is_file(value: Any) -> bool:
    """A file on disk. The streams of the terminal are pickled as their names."""
    on_disk = isinstance(value, io.TextIOWrapper | io.FileIO | io.BufferedIOBase)
    return on_disk and not isinstance(value, io.BytesIO) and value not in (sys.stdin, sys.stdout, sys.stderr)


def _is_on_device(thing: Any) -> bool:
    is_tensor = type(thing).__module__.startswith("torch") and hasattr(type(thing), "requires_grad")
    return bool(is_tensor and thing.device.type != "cpu")


def _kind(thing: Any) -> str:
    return getattr(thing, "__qualname__", type(thing).__name__)


# ---------------------------------------------------------------- rows


def read_rows(rows: Any) -> list[dict[str, Any]]:
    """Plain dicts of a sequence of dicts, a `datasets.Dataset` or a pandas frame.

    Raises: DataError: `rows` is none of these, is empty, or a row is no dict.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a pandas frame iterates over its columns
        rows = rows.to_dict("records")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        hint = f"; choose a split: {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        raise DataError(
            f"`rows` must be a sequence of dicts or a datasets.Dataset, not a {type(rows).__name__}{hint}"
        )
    plain = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} of `rows` is a {type(row).__name__}, not a dict of columns")
        plain.append(dict(row))
    if not plain:
        raise DataError("`rows` is empty: a task needs at least one row")
    return plain


def check_column(rows: list[dict[str, Any]], key: str, column: str) -> None:
    """Raises: DataError: no row has the column that `key` names."""
    if not any(find_column(row, column) is not None for row in rows):
        columns = sorted({str(name) for row in rows for name in row})
        raise DataError(
            f"no row has the column {column!r} (`{key}`); the rows have {columns}.\n"
            f"  Rename a column, or name the right one: {key} = ..."
        )


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    """One JSON object a line. Raises: DataError: JSON cannot represent a value; names row and column."""
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, default=_number, ensure_ascii=False))
        except (TypeError, ValueError):
            name, value = next((n, v) for n, v in row.items() if not _is_json(v))
            raise DataError(
                f"row {index}, column {name!r}: a {type(value).__name__} cannot be kept as JSON.\n"
                "  Use text, numbers, lists and dicts, or leave the column out"
            ) from None
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def _number(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, default=_number)
    except (TypeError, ValueError):
        return False
    return True


# ---------------------------------------------------------------- before a run


def check(prepared: PreparedConfig, run_path: Path) -> None:
    """Print warnings. Raises: ConfigError, DataError, RewardError: the run could not begin."""
    for warning in preflight(prepared.config, run_path):
        warn(warning)
    for line in inert(prepared.config):
        info(f"Note: {line}.")
    with tempfile.TemporaryDirectory(prefix="millrace-") as name:
        place = RunDirectory(Path(name).resolve())
        prepared.place(place.path)
        place.write_config(prepared.config)
        for warning in ask("check", {"run": str(place.path)}):
            warn(warning)
