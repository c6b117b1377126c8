"""The page of the architecture names functions, classes and constants that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def defined(path: Path) -> set[str]:
    """Functions, classes, constants, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def test_every_step_of_the_walk_is_in_the_code() -> None:
    walk = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = STEP.findall(walk)
    assert len(steps) >= 30
    source = ROOT / "src" / "millrace"
    wrong = [(file, name) for file, name in steps if name not in defined(source / file)]
    assert not wrong, f"docs/architecture.md names what is not there: {wrong}"


def test_every_line_of_the_walk_names_a_step() -> None:
    section = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## A walk through the code")[1]
    )
    numbered = [line for line in section.split("\n## ")[0].splitlines() if re.match(r"\d+\. ", line)]
    assert numbered and all(STEP.search(line) for line in numbered)
