"""The project's own source, parsed once."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = "millrace"


@dataclass
class Module:
    """One file. `layer` is the package below `millrace` that it belongs to ("" for the root), or its wing."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def layer(self) -> str:
        return layer_of(self.name)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        """Where `node` is, for a message."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def layer_of(name: str) -> str:
    package, layer = [*name.split("."), ""][:2]
    return layer if package == PACKAGE else package


def parse(path: Path, name: str) -> Module:
    text = path.read_text()
    return Module(name, path, ast.parse(text, str(path)), len(text.splitlines()))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the core and of its wings."""
    paths = sorted(SOURCE.rglob("*.py"))
    return tuple(parse(path, module_name(path)) for path in paths)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every import anywhere in `module`, as a dotted name: `from a import b` gives `a.b`."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call in `module` with the dotted name of what is called."""
    yield from ((node, dotted(node.func)) for node in module.nodes if isinstance(node, ast.Call))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for the expression `a.b.c`; what is not a name becomes `?`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files under version control. Skips the test where there is no repository."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())
