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

from tests.tidy.sources import PACKAGE, SOURCE, Module, layer_of, modules
from tests.tidy.test_layers import own_imports

MODULES = range(3, 21)
"""Modules of a folder. A folder of fewer is a file, or part of the folder above."""
COMMANDS_MAX = 24
"""Of `cli`: one file a command."""
LEVELS_MAX = 3
"""Folders below a package of `src`."""
SPLINTER = 40
"""A module with fewer lines of code and one importer in its own package is a part of that importer."""

READING_PATH_FILES = 60
READING_PATH_LINES = 9_000

BUDGETS = {
    "algorithms": 500,
    "api": 1_100,
    "checks": 1_250,
    "cli": 1_100,
    "config": 2_750,
    "controller": 4_525,
    "conversations": 1_100,
    "core": 1_725,
    "devices": 990,
    "diagnose": 1_650,
    "engines": 5_550,
    "episodes": 5_800,
    "estimates": 200,
    "evaluation": 600,
    "ledger": 1_850,
    "millrace_chaos": 1_200,
    "millrace_curation": 1_200,
    "millrace_jax": 2_300,
    "millrace_ray": 1_300,
    "millrace_sandbox": 2_803,
    "millrace_sim": 5_812,
    "millrace_sweeps": 1_300,
    "millrace_ui": 4_600,
    "observe": 2_300,
    "placement": 1_150,
    "quickstart": 300,
    "rewards": 2_328,
    "rollout": 1_050,
    "run": 1_250,
    "run_directory": 500,
    "runtime": 1_800,
    "schedule": 1_250,
    "serve": 500,
    "sft": 275,
    "tasks": 1_220,
    "trainer": 5_650,
    "weights": 2_900,
}
"""Lines of code of each package with all of its folders. Whoever needs more finds what can go first."""


def reading_path() -> list[Path]:
    """The files of the reading path in docs/architecture.md."""
    text = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The reading path", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*?) \|", section, re.MULTILINE)
    return [
        SOURCE / PACKAGE / folder / f"{name}.py"
        for folder, cell in rows
        for name in re.findall(r"`([\w/]+)`", cell)
    ]


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


def package_lines(package: str) -> int:
    inside = (module for module in sources() if package in (module.layer, module.name.partition(".")[0]))
    return sum(lines_of_code(module.path) for module in inside)


def test_every_folder_has_as_many_modules_as_a_reader_takes_in() -> None:
    offenders = [
        f"{name}: {len(files)} modules"
        for name, files in folders().items()
        if len(files) not in (range(COMMANDS_MAX) if name == "cli" else MODULES)
        and name not in (".", PACKAGE, "estimates")
    ]
    assert not offenders, "\n".join(offenders)


def test_no_folder_is_deeper_than_three_levels() -> None:
    offenders = [name for name in folders() if name.count("/") >= LEVELS_MAX + name.startswith(f"{PACKAGE}_")]
    assert not offenders, "\n".join(offenders)


def test_no_module_is_a_splinter_of_the_one_that_imports_it() -> None:
    importers = defaultdict(set)
    for module in modules():
        for target in own_imports(module):
            importers[target].add(module.name)
    offenders = [
        f"{module.name}: {lines} lines, imported by {importer} alone"
        for module in sources()
        if (lines := lines_of_code(module.path)) < SPLINTER
        and len(importers[module.name]) == 1
        and layer_of(importer := next(iter(importers[module.name]))) == module.layer
        and not any("Protocol" in ast.dump(node) for node in module.nodes if isinstance(node, ast.ClassDef))
    ]
    assert not offenders, "\n".join(offenders)


def test_every_package_keeps_its_budget() -> None:
    packages = {module.layer or PACKAGE for module in sources()}
    assert packages - {PACKAGE, "__main__"} == set(BUDGETS)
    found = {package: package_lines(package) for package in BUDGETS}
    offenders = [
        f"{name}: {lines} of {BUDGETS[name]}" for name, lines in found.items() if lines > BUDGETS[name]
    ]
    assert not offenders, "\n".join(offenders)


def test_the_reading_path_is_read_in_a_day() -> None:
    files = reading_path()
    assert len(files) == len(set(files)) <= READING_PATH_FILES
    assert not [str(path) for path in files if not path.is_file()]
    assert sum(map(lines_of_code, files)) <= READING_PATH_LINES


def test_the_reading_path_has_every_file_of_the_walk_through_the_code() -> None:
    text = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.split("## A walk through the code", 1)[1].split("\n## ", 1)[0]
    named = {SOURCE / PACKAGE / name for name in re.findall(r"`([\w/]+\.py)", walk)}
    assert len(named) > 15
    assert not [str(path) for path in named - set(reading_path())]


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module in sources():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node))
    offenders = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not offenders, "\n".join(offenders)


def test_no_two_modules_of_a_package_have_one_name() -> None:
    """In the core, or in one wing. A command has the name of what it does."""
    places = defaultdict(list)
    for module in sources():
        if module.layer != "cli" and "commands" not in module.name:
            places[module.name.partition(".")[0], module.path.stem].append(folder(module.path))
    offenders = [f"{name}: {', '.join(where)}" for (_, name), where in places.items() if len(where) > 1]
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


def test_every_unit_test_is_named_after_what_it_tests() -> None:
    """A module, a package or a wing, with what is tested of it: `test_reward_worker_answers.py`."""
    known = {part.removeprefix(f"{PACKAGE}_") for module in modules() for part in module.name.split(".")}
    known |= {"benchmarks", "examples", "studies"}
    offenders = [
        path.name
        for path in sorted((SOURCE.parent / "tests" / "unit").glob("test_*.py"))
        if not known & set(beginnings(path.stem.removeprefix("test_")))
    ]
    assert not offenders, "\n".join(offenders)


def beginnings(name: str) -> Iterator[str]:
    """`a`, `a_b` and `a_b_c` of `a_b_c`."""
    words = name.split("_")
    yield from ("_".join(words[:count]) for count in range(1, len(words) + 1))
