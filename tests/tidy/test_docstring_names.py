"""A docstring names modules, functions and keys that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.config.tree import leaves
from tests.tidy.sources import PACKAGE, Module, modules

NAME = re.compile(r"`([a-z_]\w*(?:\.\w+)+)`")
NO_NAMES = {"ledger.sqlite.mark", "observe.KEY"}  # a file, and any key of a section
KINDS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names in backticks, in docstrings of `module`."""
    for node in module.nodes:
        if isinstance(node, KINDS):
            yield from ((node, name) for name in NAME.findall(ast.get_docstring(node) or ""))


def defined() -> tuple[set[str], set[str]]:
    """Modules and packages, and what each binds at its top level. Without `millrace.`."""
    places, objects = set[str](), set[str]()
    for module in modules():
        place = module.name.removeprefix(f"{PACKAGE}.")
        places.add(place)
        for node in module.tree.body:
            bound = {getattr(node, "name", "")} | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if isinstance(node, ast.ImportFrom):
                bound |= {alias.asname or alias.name for alias in node.names}
            objects |= {f"{place}.{name}" for name in bound if name}
    return places, objects


def test_a_name_in_a_docstring_that_begins_with_a_package_exists() -> None:
    places, objects = defined()
    known = places | objects | {key for key, _, _ in leaves(Config)}
    packages = {module.layer for module in modules()} - {"config"}  # `config` is an argument too, and a file
    looked_at, wrong = 0, []
    for module in modules():
        for node, name in names(module):
            name = name.removeprefix(f"{PACKAGE}.")
            if name.split(".")[0] not in packages or name in NO_NAMES:
                continue
            looked_at += 1
            if name not in known and name.rpartition(".")[0] not in objects:
                wrong.append(f"{module.at(node)}: `{name}`")
    assert looked_at > 50 and not wrong, "\n".join(wrong)
