"""The shape of a schema: which keys exist, which are tables, which are unions on `kind`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from millrace.config.tables.section import Section

Tree = dict[str, Any]


def union_kinds(field: FieldInfo) -> dict[str, type[Section]]:
    """The alternatives of a tagged union by kind; empty for any other field."""
    if field.discriminator != "kind":
        return {}
    options = (option for option in get_args(field.annotation) if option is not type(None))
    return {kind: option for option in options for kind in get_args(option.model_fields["kind"].annotation)}


def default_kind(field: FieldInfo) -> str | None:
    """The kind that a union has when the configuration does not mention it; None: it is required."""
    return None if field.is_required() or field.default is None else field.default.kind


def plain_table(field: FieldInfo) -> type[Section] | None:
    """The section of a table that is not a union."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def listed_table(field: FieldInfo | None) -> type[Section] | None:
    """The section of each table of a list of tables."""
    if field is None or get_origin(field.annotation) is not tuple:
        return None
    inner = get_args(field.annotation)[0]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def admits_none(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def leaves(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, str | None, FieldInfo]]:
    """Every leaf as (dotted key, kind it belongs to, field), in the order of definition."""
    for name, field in schema.model_fields.items():
        key = prefix + name
        section = plain_table(field)
        if section is not None:
            yield from leaves(section, key + ".")
        elif kinds := union_kinds(field):
            for kind, option in kinds.items():
                for leaf, _, inner in leaves(option, key + "."):
                    yield leaf, kind, inner
        else:
            yield key, None, field
