"""A key has one default: that of its table in `config/tables`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from millrace.config.schema import Config
from millrace.config.tree import leaves
from tests.tidy.sources import Module, modules

FIELDS_MIN = 3
"""A class with so many fields that are named like keys of one table takes over that table."""
OTHERS = {
    ("Call", "sampling"): "a request of an agent, which may leave out what it names",
    ("SampledRequest", "sampling"): "a request by HTTP, which may leave out what it names",
    ("SampledRequest", "reward"): "the same",
    ("ClusterSection", "model"): "the keys of a simulated cluster: its own formats and devices",
}
"""Classes that have the names and not the meaning."""

Defaults = dict[str, list[Any]]


def tables() -> dict[str, Defaults]:
    """Of each table, the defaults of its keys; of a union, those of all its kinds."""
    found: dict[str, Defaults] = defaultdict(lambda: defaultdict(list))
    for key, _, field in leaves(Config):
        table, _, name = key.rpartition(".")
        found[table][name] += [] if field.is_required() else [field.get_default(call_default_factory=True)]
    return found


def own_defaults(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    return {
        line.target.id: line.value
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def taken_over(node: ast.ClassDef, of_tables: dict[str, Defaults]) -> Iterator[tuple[str, str, ast.expr]]:
    """Table, key and default of each field of a class that takes over a table."""
    own = own_defaults(node)
    for table, keys in of_tables.items():
        if len(own.keys() & keys.keys()) >= FIELDS_MIN and (node.name, table) not in OTHERS:
            yield from ((table, name, own[name]) for name in own.keys() & keys.keys() if own[name])


def contradictions(module: Module, of_tables: dict[str, Defaults]) -> Iterator[str]:
    for node in (node for node in module.nodes if isinstance(node, ast.ClassDef)):
        places = defaultdict(list)
        for table, name, value in taken_over(node, of_tables):
            if isinstance(value, ast.Constant | ast.Tuple | ast.List | ast.UnaryOp):
                places[name, ast.literal_eval(value)].append((table, of_tables[table][name]))
        for (name, value), known in places.items():
            if not any(value in defaults for _, defaults in known):
                yield f"{module.at(node)}: {node.name}.{name} = {value!r}, and the key has {known}"


def test_a_class_that_takes_over_a_table_has_no_default_of_its_own() -> None:
    of_tables = tables()
    offenders = [
        line for module in modules() if module.layer != "config" for line in contradictions(module, of_tables)
    ]
    assert not offenders, "\n".join(offenders)


def test_another_default_is_found() -> None:
    text = "class Engine:\n  slots: int = 32\n  exact: bool = True\n  tensor: int = _ROLLOUT.tensor\n"
    nodes = tuple(ast.walk(tree := ast.parse(text)))
    module = Module("engine", modules()[0].path, tree, 4)
    module.__dict__["nodes"] = nodes
    assert [line.split(": ", 1)[1] for line in contradictions(module, tables())] == [
        "Engine.exact = True, and the key has [('rollout', [False])]"
    ]


def test_every_exception_is_needed() -> None:
    of_tables = tables()
    found = {
        (node.name, table)
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        for table, keys in of_tables.items()
        if len(own_defaults(node).keys() & keys.keys()) >= FIELDS_MIN
    }
    assert OTHERS.keys() <= found
