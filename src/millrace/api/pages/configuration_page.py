"""The configuration reference as Markdown, made from the schema: keys, defaults, meanings.

`python -m millrace.api.pages.configuration_page FILE` rewrites the text between the markers in FILE.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.config.tree import changed_fields, default_kind, listed_table, plain_table, union_kinds
from millrace.run_directory.toml import as_toml
from millrace.sft.sft_config import SupervisedConfig
from millrace.sim.config import SimulatedConfig

ABSURD = 1_000_000

SCHEMAS: dict[str, type[Section]] = {
    "millrace.config.schema": Config,
    "millrace.sim.config": SimulatedConfig,
    "millrace.sft.sft_config": SupervisedConfig,
}
_BLOCK = re.compile(r"(<!-- reference: [^\n]* from ([\w.]+) -->\n).*?(<!-- end of reference -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """The document with every reference in it made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{reference(SCHEMAS[m[2]])}\n{m[3]}", text)


def reference(schema: type[Section]) -> str:
    """One table per section, unions one table per kind, in the order of the schema."""
    top = {name: field for name, field in schema.model_fields.items() if _is_leaf(field)}
    parts = ["\n".join(_table("", top))] if top else []
    for name, field in schema.model_fields.items():
        section = plain_table(field)
        if section is not None:
            parts.append("\n".join([f"### `[{name}]`", "", *_table(name + ".", section.model_fields)]))
        if listed := listed_table(field):
            about = _line(field.description or "")
            parts.append("\n".join([f"### `[[{name}]]`", "", about, "", *_table("", listed.model_fields)]))
        for kind, option in union_kinds(field).items():
            note = " (default)" if default_kind(field) == kind else ""
            title = f'### `[{name}]` with `kind = "{kind}"`{note}'
            fields = changed_fields(field, kind)
            if len(fields) < len(option.model_fields) - 1:
                changed = ", ".join(f"`{key} = {as_toml(inner.default)}`" for key, inner in fields.items())
                body = [f'The keys of `"{default_kind(field)}"`. Other defaults: {changed}.']
            else:
                body = [*_table(f"{name}.", fields)] if fields else ["No keys of its own."]
            parts.append("\n".join([title, "", *_about(option), *body]))
    return "\n\n".join(parts) + "\n"


def _is_leaf(field: FieldInfo) -> bool:
    return plain_table(field) is None and not union_kinds(field) and not listed_table(field)


def _about(option: type[Section]) -> list[str]:
    """What is said of the kind itself: its docstring, or its `kind` field's."""
    about = option.model_fields["kind"].description
    return [_line(about), ""] if about else []


def _table(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        cells = (f"`{prefix}{name}`", _type(field), _default(field), _line(field.description or ""))
        yield "| " + " | ".join(cells).rstrip() + " |"


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
    """Limits that a run may come near; those against absurd numbers are not listed."""
    constraints = [inner for item in metadata for inner in getattr(item, "metadata", [item])]
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        (sign, getattr(c, name)) for c in constraints for name, sign in signs.items() if hasattr(c, name)
    ]
    limits = " and ".join(f"{sign} {limit:g}" for sign, limit in found if limit < ABSURD)
    return f" {limits}" if limits else ""


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(args[0]) + _bounds(args[1:])
    if origin is Literal:
        return " or ".join(f"`{as_toml(arg)}`" for arg in args)
    if origin in (Union, types.UnionType):
        told = ('`"none"`' if arg is type(None) else _name(arg) for arg in args)
        return " or ".join(dict.fromkeys(told))
    if origin is tuple:
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
