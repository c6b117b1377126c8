"""A tree that a stranger can read: few files side by side, one name for one thing, budgets of lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.sources import PACKAGE, SOURCE, Module, modules

FILES_MAX = 20
A_FILE_AN_IDEA = {"algorithms", "cli"}  # an algorithm or a command each
FILES_OF_IDEAS_MAX = 24

READING_PATH_MAX = 9_085


def reading_path() -> dict[str, int]:
    """The packages of the reading path in docs/architecture.md, each with its budget of lines of code."""
    text = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The reading path", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([\w/]+)` \| .* \| ([\d,]+) \|$", section, re.MULTILINE)
    return {package: int(lines.replace(",", "")) for package, lines in rows}


CORE = ("core", "core/completion", "config", "config/tables")
CORE_PATH_MAX = 13_200
LARGEST_PACKAGE_MAX = 2000


def folder(path: Path) -> str:
    return path.parent.relative_to(SOURCE).as_posix().removeprefix(f"{PACKAGE}/")


def sources() -> list[Module]:
    """Every module but what only marks a folder."""
    return [module for module in modules() if module.path.stem != "__init__"]


@cache
def folders() -> dict[str, list[Module]]:
    found = defaultdict(list)
    for module in sources():
        found[folder(module.path)].append(module)
    return dict(found)


def docstrings(tree: ast.Module) -> Iterator[int]:
    """Lines of docstrings."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
            ):
                pass
            case ast.AsyncFunctionDef(body=[first, *_]):
                pass
            case _:
                continue
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def lines_of_code(path: Path) -> int:
    """Lines with code: neither blank, nor a comment, nor a docstring."""
    text = path.read_text()
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - set(docstrings(ast.parse(text))))


def package_lines(name: str) -> int:
    return sum(lines_of_code(module.path) for module in folders()[name])


def test_no_folder_shows_more_files_than_a_reader_takes_in() -> None:
    offenders = [
        f"{name}: {len(files)} files"
        for name, files in folders().items()
        if len(files) > (FILES_OF_IDEAS_MAX if name in A_FILE_AN_IDEA else FILES_MAX)
    ]
    assert not offenders, "\n".join(offenders)


def test_every_package_of_the_reading_path_keeps_its_budget() -> None:
    budgets = reading_path()
    assert len(budgets) == 11
    lines = {name: package_lines(name) for name in budgets}
    offenders = [f"{name}: {lines[name]} of {most}" for name, most in budgets.items() if lines[name] > most]
    assert not offenders, "\n".join(offenders)


def test_the_reading_path_and_the_core_path_keep_their_budgets() -> None:
    path = sum(map(package_lines, reading_path()))
    assert path <= READING_PATH_MAX
    assert path + sum(map(package_lines, CORE)) <= CORE_PATH_MAX


def test_no_package_grows_beyond_its_budget() -> None:
    offenders = [
        f"{name}: {lines}" for name in folders() if (lines := package_lines(name)) > LARGEST_PACKAGE_MAX
    ]
    assert not offenders, "\n".join(offenders)


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module in sources():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node))
    offenders = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not offenders, "\n".join(offenders)


def test_no_three_modules_have_one_name() -> None:
    places = defaultdict(list)
    for module in sources():
        places[module.path.stem].append(folder(module.path))
    offenders = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 2]
    assert not offenders, "\n".join(offenders)


def test_no_two_test_modules_have_one_name() -> None:
    """Pytest imports test modules of folders without `__init__.py` by their name alone."""
    tests = SOURCE.parent / "tests"
    places = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        if not (path.parent / "__init__.py").exists():
            places[path.name].append(path.parent.relative_to(tests).as_posix())
    offenders = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not offenders, "\n".join(offenders)
