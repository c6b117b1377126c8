"""One screen per idea."""

from __future__ import annotations

import ast
from functools import cache

from tests.tidy.sources import ROOT, Module, modules, parse, tracked_files

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


@cache
def everything() -> list[Module]:
    """The package, and the tracked files beside it."""
    tracked = [path for path in tracked_files() if path.suffix == ".py" and ROOT / "src" not in path.parents]
    return [*modules(), *(parse(path, path.stem) for path in tracked)]


def test_no_module_is_longer_than_500_lines() -> None:
    offenders = [
        f"{module.at(module.tree)}: {module.num_lines} lines"
        for module in everything()
        if module.num_lines > MODULE_LINES_MAX
    ]
    assert not offenders, "\n".join(offenders)


def test_no_function_is_longer_than_70_lines() -> None:
    offenders = []
    for module in everything():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    offenders.append(f"{module.at(node)}: {node.name} has {length} lines")
    assert not offenders, "\n".join(offenders)
