"""Describes the problems of a configuration: key, value, line and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from millrace.config.foreign import OURS, RENAMED
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.config.tree import leaves, listed_table, plain_table, union_kinds

PROBLEMS_MAX = 50

Location = Sequence[str | int]


def describe(schema: type[Section], error: ValidationError, origins: dict[str, str]) -> str:
    """The first problems, each once, in the order of the schema, with `[file:line]`."""
    problems: dict[str, str] = {}
    for detail in error.errors()[:PROBLEMS_MAX]:
        key, section, field = _locate(schema, detail["loc"])
        if detail["type"].startswith("union_tag"):
            key += ".kind"
        message = _message(schema, detail, key, section, field)
        mentioned = re.findall(r"`([\w.]+)`", message) if detail["type"] == "value_error" else []
        where = dict.fromkeys(o for k in [key, *mentioned] if (o := _origin(origins, k)))
        problems.setdefault(key or message, message + (f"   [{', '.join(where)}]" if where else ""))
    more = error.error_count() - PROBLEMS_MAX
    return "\n".join([*problems.values(), *([f"... and {more:,} more"] if more > 0 else [])])


def _locate(schema: type[Section], loc: Location) -> tuple[str, type[Section], FieldInfo | None]:
    """Pydantic's location without its union tags: dotted key, its section, its field if it has one."""
    section, field, names, key = schema, None, list(loc), ""
    while names:
        name = names.pop(0)
        key = f"{key}.{name}" if key else str(name)
        field = section.model_fields.get(str(name))
        if field is None or not names:
            break
        if (listed := listed_table(field)) and len(names) > 1:
            key, section = key + _inner(names.pop(0)), listed
            continue
        inner = union_kinds(field).get(str(names.pop(0))) if union_kinds(field) else plain_table(field)
        if inner is None:
            return key + _inner(names[0]), section, field
        section = inner
    return key, section, field


def _inner(name: str | int) -> str:
    return f"[{name}]" if isinstance(name, int) else f".{name}"


def _message(
    schema: type[Section], detail: Any, key: str, section: type[Section], field: FieldInfo | None
) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(schema, key, section, _kind(section, detail["loc"]))
        case "missing":
            return _missing(key, field)
        case "union_tag_not_found" | "union_tag_invalid" if field is not None:
            return _wrong_kind(key, field, detail["input"])
        case "model_type" | "model_attributes_type":
            return (
                f"`{key}` ({detail['input']!r}) must be a table.\n"
                f"  Write its keys under `[{key}]`, or set one of them: --set {key}.KEY=VALUE"
            )
        case "value_error":
            return str(detail["ctx"]["error"])
    reason = re.sub(r"^(Input|String) should", "must", detail["msg"])
    must = "has a type that the key cannot have" if _free_form(field) else reason
    return f"`{key}` ({detail['input']!r}) {must}.{_meaning(field)}"


def _free_form(field: FieldInfo | None) -> bool:
    """A table of values of several types: pydantic reports the failure of each type."""
    return field is not None and get_origin(field.annotation) is dict


def _kind(section: type[Section], loc: Location) -> str | None:
    """The union tag before an unknown key of `section`; None: the section is not of a union."""
    field, tag = section.model_fields.get("kind"), loc[-2] if len(loc) > 1 else None
    return str(tag) if field is not None and tag in get_args(field.annotation) else None


def _unknown(schema: type[Section], key: str, section: type[Section], kind: str | None) -> str:
    if key in RENAMED:
        return f"`{key}` was renamed to `{RENAMED[key]}`"
    table, _, name = key.rpartition(".")
    others = [other for leaf, other, _ in leaves(schema) if leaf == key and other]
    if kind and others:
        return (
            f"`{key}` is a key of kind {' and '.join(map(repr, others))}, but `{table}.kind` is {kind!r}.\n"
            f"  Leave the key out, or set `{table}.kind` to {others[0]!r}"
        )
    of_kind = f" for kind {kind!r}" if kind else ""
    return f"unknown key `{key}`{of_kind}.\n  {_suggestion(schema, key, name, section)}"


def _suggestion(schema: type[Section], key: str, name: str, section: type[Section]) -> str:
    if schema is Config and name in OURS:
        return f"The key here is `{OURS[name]}`: docs/glossary.md has other frameworks' names"
    table = key[: -len(name)]
    known = list(dict.fromkeys([*section.model_fields, *(schema.model_fields if not table else ())]))
    elsewhere = list(dict.fromkeys(leaf for leaf, _, _ in leaves(schema)))
    same_name = [leaf for leaf in elsewhere if leaf.rpartition(".")[2] == name]
    if near := difflib.get_close_matches(name, known, n=1):
        return f"Did you mean `{table}{near[0]}`?"
    if near := same_name or difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8):
        return f"Did you mean `{near[0]}`?"
    return "The keys here are " + ", ".join(f"`{table}{known_name}`" for known_name in known)


def _missing(key: str, field: FieldInfo | None) -> str:
    table, _, name = key.rpartition(".")
    if field is not None and union_kinds(field):
        return f"`{key}` is missing.\n  Add `[{key}]` with `kind` one of {_kinds(field)}"
    if field is not None and plain_table(field):
        return f"`{key}` is missing.\n  Add `[{key}]` with its keys"
    place = f" under `[{table}]`" if table else ""
    add = "" if key.endswith("]") else f"\n  Add `{name} = ...`{place}"
    return f"`{key}` is missing.{_meaning(field)}{add}"


def _wrong_kind(key: str, field: FieldInfo, value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else value
    if kind is None:
        return f"`{key}` is missing.\n  Set it to one of {_kinds(field)}"
    near = difflib.get_close_matches(str(kind), union_kinds(field), n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"`{key}` ({kind!r}) is not known.\n  {hint}The kinds are {_kinds(field)}"


def _kinds(field: FieldInfo) -> str:
    return ", ".join(repr(kind) for kind in union_kinds(field))


def _meaning(field: FieldInfo | None) -> str:
    if field is None or not field.description:
        return ""
    return "\n  Meaning: " + " ".join(field.description.split())


def _origin(origins: dict[str, str], key: str) -> str | None:
    """The place of a key, or of the nearest table around it."""
    key = key.partition("[")[0]
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None
