"""`millrace keys`: every key of a configuration, with its type, its default and what it means."""

from __future__ import annotations

import difflib
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS, PolicyGradient
from millrace.config.tables.section import Section
from millrace.config.toml_text import as_toml
from millrace.config.tree import default_kind, listed_table, plain_table, union_kinds
from millrace.core.errors import ConfigError
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal
from millrace.sft.sft_config import SupervisedConfig

ABSURD = 1_000_000


class File(StrEnum):
    RUN = "run"
    SFT = "sft"
    SIMULATE = "simulate"
    PLAN = "plan"
    SWEEP = "sweep"


@dataclass(frozen=True)
class KeyRow:
    """One key, one kind of a table, or one preset. Values are code of Markdown."""

    table: str
    key: str
    kinds: str
    type: str
    default: str
    meaning: str

    @property
    def cells(self) -> tuple[str, ...]:
        return self.key, self.kinds, self.type, self.default, self.meaning.replace("|", "\\|")


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[TABLE|KEY]", help="`schedule`, or `batch.prompts`.", show_default=False),
    ] = None,
    file: Annotated[File, typer.Option("--of", help="Whose file it is.")] = File.RUN,
    markdown: Annotated[bool, typer.Option(help="Print tables of Markdown.")] = False,
) -> None:
    """Every key of a configuration, the keys of one table, or one key: type, default, meaning."""
    found = [row for row in rows(schema_of(file)) if name is None or _is_below(row, name)]
    if not found:
        known = {part for row in rows(schema_of(file)) for part in (row.table, _plain(row))} - {""}
        near = difflib.get_close_matches(name or "", known, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "`millrace keys` lists all."
        raise ConfigError(f"`{name}` is no table and no key of this configuration.\n  {hint}")
    if markdown:
        typer.echo("\n".join(as_markdown(found)))
        return
    console = Terminal(soft_wrap=True)
    for row in found:
        kinds = f" (kind {row.kinds})" if row.kinds else ""
        default = row.default if row.default in ("", "required") else f"default {row.default}"
        facts = "; ".join(fact for fact in (row.type, default) if fact)
        console.print(f"{_plain(row)}{kinds}: {facts}".replace("`", ""), style="bold")
        if row.meaning:
            console.print(textwrap.indent(textwrap.fill(row.meaning, max(20, console.width - 2)), "  "))


def schema_of(file: File) -> type[Section]:
    wings = {
        File.SIMULATE: "sim.SimulatedConfig",
        File.PLAN: "sim.PlanConfig",
        File.SWEEP: "sweeps.SweepConfig",
    }
    own: dict[File, type[Section]] = {File.RUN: Config, File.SFT: SupervisedConfig}
    return own.get(file) or cast("type[Section]", wing(wings[file]))


def as_markdown(found: Iterable[KeyRow]) -> Iterator[str]:
    """A heading and a table for each table of the configuration."""
    table = None
    for row in found:
        if row.table != table:
            table = row.table
            yield from ("", f"## `[{table}]`", "") if table else ("",)
            yield from ("| key | of kind | type | default | meaning |", "|---|---|---|---|---|")
        yield "| " + " | ".join(row.cells).rstrip() + " |"


def rows(schema: type[Section], prefix: str = "", table: str = "") -> Iterator[KeyRow]:
    """In the order of the schema, the keys outside of tables first."""
    fields = schema.model_fields
    below = {name: field for name, field in fields.items() if not _is_leaf(field)}
    for name, field in fields.items():
        if name not in below:
            yield _row(table, prefix + name, "", field)
    for name, field in below.items():
        key = prefix + name
        if listed := listed_table(field):
            yield from _listed(key, field, listed)
        elif section := plain_table(field) or _optional_table(field):
            yield from rows(section, f"{key}.", key)
        else:
            yield from _union(key, field)


def _union(key: str, field: FieldInfo) -> Iterator[KeyRow]:
    """Its kinds, and the keys of all kinds. A key that is the same in several kinds has one row."""
    first = default_kind(field)
    options: dict[type[Section], list[str]] = {}
    for kind, option in union_kinds(field).items():
        options.setdefault(option, []).append(kind)
        preset = PRESETS.get(kind) if option is PolicyGradient else None
        meaning = (
            _line(option.model_fields["kind"]) if preset is None else f"{preset.meaning} ({preset.source})"
        )
        defaults = ", ".join(f"`{k} = {as_toml(v)}`" for k, v in preset.defaults.items()) if preset else ""
        meaning = f"The default. {meaning}".strip() if kind == first else meaning
        yield KeyRow(
            key, f"`{key}.kind = {as_toml(kind)}`", "", "preset" if preset else "", defaults, meaning
        )
    shared: dict[KeyRow, list[str]] = {}
    for option, kinds in options.items():
        of_kind = "a preset" if len(kinds) > 1 else f"`{as_toml(kinds[0])}`"
        for name, inner in option.model_fields.items():
            if name != "kind" and not listed_table(inner):
                shared.setdefault(_row(key, f"{key}.{name}", "", inner), []).append(of_kind)
    for row, kinds in shared.items():
        of_kinds = "" if len(kinds) == len(options) else ", ".join(kinds)
        yield KeyRow(row.table, row.key, of_kinds, row.type, row.default, row.meaning)
    for option in options:
        for name, inner in option.model_fields.items():
            if listed := listed_table(inner):
                yield from _listed(f"{key}.{name}", inner, listed)
            elif section := _optional_table(inner):
                yield from rows(section, f"{key}.{name}.", f"{key}.{name}")


def _listed(key: str, field: FieldInfo, listed: type[Section]) -> Iterator[KeyRow]:
    """The list, and the keys of each of its tables. A table in there has its keys elsewhere."""
    yield KeyRow(key, f"`{key}`", "", "list of tables", _default(field), _line(field))
    for name, inner in listed.model_fields.items():
        yield _row(key, f"{key}.{name}", "", inner)


def _optional_table(field: FieldInfo) -> type[Section] | None:
    """The section of a table that may be left out."""
    inner = [arg for arg in get_args(field.annotation) if arg is not type(None)]
    alone = inner[0] if len(inner) == 1 and not union_kinds(field) else None
    return alone if isinstance(alone, type) and issubclass(alone, Section) else None


def _plain(row: KeyRow) -> str:
    return row.key.strip("`")


def _is_below(row: KeyRow, name: str) -> bool:
    key = _plain(row).partition(" ")[0]
    return key == name or key.startswith(f"{name}.") or _plain(row) == name


def _is_leaf(field: FieldInfo) -> bool:
    tables = plain_table(field), _optional_table(field), listed_table(field)
    return not any(tables) and not union_kinds(field)


def _row(table: str, key: str, kinds: str, field: FieldInfo) -> KeyRow:
    return KeyRow(table, f"`{key}`", kinds, _type(field), _default(field), _line(field))


def _line(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{as_toml(field.get_default(call_default_factory=True))}`"


def _type(field: FieldInfo) -> str:
    name, off, rest = _name(field.annotation).partition(" or ")
    return name + _bounds(field.metadata) + off + rest


def _bounds(metadata: Iterable[Any]) -> str:
    """The limits that a run may come near. Limits against absurd numbers are not listed."""
    constraints = [inner for item in metadata for inner in getattr(item, "metadata", [item])]
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        (sign, getattr(c, name)) for c in constraints for name, sign in signs.items() if hasattr(c, name)
    ]
    limits = " and ".join(f"{sign} {limit:g}" for sign, limit in bounds if limit < ABSURD)
    return f" {limits}" if limits else ""


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(args[0]) + _bounds(args[1:])
    if origin is Literal:
        return " or ".join(f"`{as_toml(arg)}`" for arg in args)
    if origin in (Union, types.UnionType):
        kinds = ('`"none"`' if arg is type(None) else _name(arg) for arg in args)
        return " or ".join(dict.fromkeys(kinds))
    if origin in (tuple, list):
        if get_origin(args[0]) is Literal:
            return f"list of {_name(args[0])}"
        name, space, bounds = _name(args[0]).partition(" ")
        count = "list of" if len(args) != 2 or Ellipsis in args else "two"
        return f"{count} {name}s{space}{bounds}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "table"
    names = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return names.get(annotation, str(annotation))
