"""The keys of a configuration as types, for editors and type checkers, made from the schema.

`python -m scripts.pages.keyword_types FILE` writes the stub FILE. Nothing imports it at run time.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from millrace.config.load import PATH_KEYS
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.config.tree import union_kinds

_HEAD = """# Made from the schema by `make docs`.
# ruff: noqa
# fmt: off
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict

class Table(Protocol):
    def model_dump(self) -> dict[str, Any]: ...
"""
_OWN_OF_TRAIN = ("reward", "algorithm", "schedule")
_OWN_OF_EVALUATE = ("model", "reward")
_PATHS = {key.rpartition(".")[2] for key in PATH_KEYS}


def stub() -> str:
    """A `TypedDict` for each table, and for the keywords of `train`, `evaluate` and `Run.resume`."""
    fields = Config.model_fields
    texts = [_HEAD, *(_typed_dict(_name(table), table.model_fields) for table in _tables(Config))]
    texts.append(_typed_dict("ResumeKeys", fields))
    for name, own in (("TrainKeys", _OWN_OF_TRAIN), ("EvaluateKeys", _OWN_OF_EVALUATE)):
        texts.append(_typed_dict(name, {key: field for key, field in fields.items() if key not in own}))
    return "\n".join(texts)


def _typed_dict(name: str, fields: dict[str, FieldInfo]) -> str:
    keys = "".join(f"    {key}: {_field(key, field)}\n" for key, field in fields.items())
    return f"class {name}(TypedDict, total=False):\n{keys}"


def _field(key: str, field: FieldInfo) -> str:
    kinds = f"Literal{[*union_kinds(field)]!r} | " if union_kinds(field) else ""
    text = kinds + _type(field.annotation)
    text = text.replace("None", "Literal['none'] | None")
    return text.replace("str", "str | PathLike[str]") if key in _PATHS else text


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return f"Literal{[*args]!r}"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type, args)))
    if origin in (tuple, list):
        inner = dict.fromkeys(_type(arg) for arg in args if arg is not Ellipsis)
        return f"Sequence[{' | '.join(inner)}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(_type, args))}]"
    if _is_table(annotation):
        return f"{_name(annotation)} | Table"
    return {type(None): "None", Any: "Any"}.get(annotation) or str(annotation.__name__)


def _tables(schema: type[Section]) -> Iterable[type[Section]]:
    """The tables below a schema, each once."""
    tables: dict[type[Section], None] = {}
    waiting = [schema]
    while waiting:
        for field in waiting.pop().model_fields.values():
            new = [table for table in _within(field.annotation) if table not in tables]
            tables |= dict.fromkeys(new)
            waiting += new
    return tables


def _within(annotation: Any) -> Iterator[type[Section]]:
    if _is_table(annotation):
        yield annotation
    for arg in get_args(annotation):
        yield from _within(arg)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _name(table: type[Section]) -> str:
    return f"{table.__name__.removesuffix('Section')}Keys"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(stub(), encoding="utf-8")
