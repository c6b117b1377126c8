"""The configuration reference as Markdown, made from the schema: keys, defaults, meanings.

`python -m scripts.pages.configuration_page FILE` rewrites the text between the markers in FILE.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from millrace.config.lines import as_toml
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS
from millrace.config.tables.section import Section
from millrace.config.tree import default_kind, listed_table, plain_table, union_kinds
from millrace.sft.sft_config import SupervisedConfig
from millrace_sim.config import SimulatedConfig

ABSURD = 1_000_000

SCHEMAS: dict[str, type[Section]] = {
    "millrace.config.schema": Config,
    "millrace_sim.config": SimulatedConfig,
    "millrace.sft.sft_config": SupervisedConfig,
}
_BLOCK = re.compile(
    r"(<!-- reference: [^\n]* from ([\w.]+)(?: (up to|after) (\w+))? -->\n).*?(<!-- end of reference -->)",
    re.DOTALL,
)


def refreshed(text: str) -> str:
    """The document with every reference renewed."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{reference(_fields(*m.group(2, 3, 4)))}\n{m[5]}", text)


def _fields(schema: str, side: str | None, table: str | None) -> dict[str, FieldInfo]:
    """The fields of a schema, or the fields `up to` or `after` a table, because a long reference has two
    pages."""
    fields = SCHEMAS[schema].model_fields
    if table is None:
        return fields
    tables = [name for name, field in fields.items() if not _is_leaf(field)]
    later = set(tables[tables.index(table) + 1 :])
    return {name: field for name, field in fields.items() if (name in later) == (side == "after")}


def reference(fields: dict[str, FieldInfo]) -> str:
    """One table per section, in the order of the schema."""
    top = {name: field for name, field in fields.items() if _is_leaf(field)}
    sections = ["\n".join(_table("", top))] if top else []
    for name, field in fields.items():
        section = plain_table(field)
        if section is not None:
            sections.append("\n".join([f"### `[{name}]`", "", *_table(name + ".", section.model_fields)]))
        if listed := listed_table(field):
            about = _line(field.description or "")
            sections.append("\n".join([f"### `[[{name}]]`", "", about, "", *_table("", listed.model_fields)]))
        if union_kinds(field):
            sections.append("\n".join([f"### `[{name}]`", "", *_union(name, field)]))
        if PRESETS.keys() <= union_kinds(field).keys():
            sections.append("\n".join([f"### Presets of `[{name}]`", "", *_presets()]))
    return "\n\n".join(sections) + "\n"


def _is_leaf(field: FieldInfo) -> bool:
    return plain_table(field) is None and not union_kinds(field) and not listed_table(field)


def _union(name: str, field: FieldInfo) -> Iterator[str]:
    """The keys of all kinds. A key that is the same in several kinds has one row."""
    kinds = {option: _kind(option) for option in union_kinds(field).values()}
    keys: dict[tuple[str, ...], list[str]] = {}
    for option, kind in kinds.items():
        for key, inner in option.model_fields.items():
            if key != "kind" and not listed_table(inner):
                keys.setdefault(_cells(f"{name}.", key, inner), []).append(kind)
    default = default_kind(field) or ("" if field.is_required() else "none")
    yield "| key | of kind | type | default | meaning |"
    yield "|---|---|---|---|---|"
    yield _row(
        f"`{name}.kind`",
        "",
        " or ".join(kinds.values()),
        f"`{as_toml(default)}`" if default else "required",
        " ".join(f"{kind}: {about}" for option, kind in kinds.items() if (about := _about(option))),
    )
    fields = [field for option in kinds for field in option.model_fields.items()]
    lists = [(key, listed, inner) for key, inner in fields if (listed := listed_table(inner))]
    for (key, *rest), of_kinds in keys.items():
        yield _row(key, "" if len(of_kinds) == len(kinds) else ", ".join(of_kinds), *rest)
    for key, listed, inner in lists:
        yield from ("", f"#### `[[{name}.{key}]]`", "", _line(inner.description or ""), "")
        yield from _table("", listed.model_fields)


def _kind(option: type[Section]) -> str:
    kinds = get_args(option.model_fields["kind"].annotation)
    return f"`{as_toml(kinds[0])}`" if len(kinds) == 1 else "a preset"


def _about(option: type[Section]) -> str:
    return _line(option.model_fields["kind"].description or "")


def _table(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        yield _row(*_cells(prefix, name, field))


def _presets() -> Iterator[str]:
    yield "A preset has these defaults. Its other defaults are those above. Numbers of sources are of arXiv."
    yield ""
    yield "| preset | meaning | defaults | source |"
    yield "|---|---|---|---|"
    for name, preset in PRESETS.items():
        defaults = ", ".join(f"`{key} = {as_toml(value)}`" for key, value in preset.defaults.items())
        yield _row(f"`{name}`", preset.meaning, defaults, preset.source)


def _cells(prefix: str, name: str, field: FieldInfo) -> tuple[str, ...]:
    return f"`{prefix}{name}`", _type(field), _default(field), _line(field.description or "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells).rstrip() + " |"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{as_toml(field.default)}`"


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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
