"""Arrows point down: who may import whom."""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.tidy.sources import PACKAGE, ROOT, SOURCE, Module, imports, layer_of, modules


def layer_table() -> dict[str, set[str]]:
    """The layers of AGENTS.md: what each may import. "all above" is every layer of the rows before."""
    text = (ROOT / "AGENTS.md").read_text()
    rows = text.split("| layer | holds | may import |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    allowed: dict[str, set[str]] = {}
    for row in rows:
        layers, _, targets = (cell.strip() for cell in row.strip("|").split("|"))
        found = set(allowed) if targets == "all above" else quoted(targets)
        allowed |= dict.fromkeys(quoted(layers), found)
    return allowed


def wing_table() -> dict[str, set[str]]:
    """The wings of AGENTS.md: which others each may import."""
    text = (ROOT / "AGENTS.md").read_text()
    rows = text.split("| wing | holds | may import |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [row.strip("|").split("|") for row in rows]
    return {wing: quoted(others) for names, _, others in cells for wing in quoted(names)}


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


MAY_IMPORT = layer_table()
WINGS = wing_table()
MAY_IMPORT |= {wing: {*MAY_IMPORT, *others} for wing, others in WINGS.items()}
WITHOUT_TORCH = (
    "core",
    "config",
    "estimates",
    "millrace_sandbox",
    "schedule",
    "ledger",
    "controller",
    "runtime",
    "millrace_sim",
    "observe",
    "run_directory",
    "diagnose",
    "evaluation",
    "run",
    "checks",
    "serve",
    "millrace_curation",
    "millrace_ui",
    "millrace_chaos",
    "api",
    "millrace_sweeps",
    "cli",
)


def own_imports(module: Module) -> dict[str, str]:
    """Modules of the project that `module` imports, for types too, each with where."""
    names = {other.name for other in modules()}
    found = {}
    for node, name in imports(module):
        target = name if name in names else name.rpartition(".")[0]
        if target in names and target != PACKAGE:
            found[target] = module.at(node)
    return found


def package(name: str) -> str:
    """The folder that holds the module `name`."""
    paths = {module.name: module.path for module in modules()}
    return name if paths[name].stem == "__init__" else name.rpartition(".")[0]


def test_every_package_has_its_place_among_the_layers() -> None:
    layers = {module.layer for module in modules() if module.layer}
    files = {path.stem for path in (SOURCE / PACKAGE).glob("*.py")}
    assert layers - files == set(MAY_IMPORT)


def test_no_module_imports_from_a_layer_above_or_beside_it() -> None:
    offenders = []
    for module in modules():
        allowed = MAY_IMPORT.get(module.layer, set(MAY_IMPORT) - set(WINGS)) | {module.layer}
        for target, place in own_imports(module).items():
            layer = layer_of(target)
            if layer not in allowed:
                offenders.append(f"{place}: {module.layer} must not import {layer} ({target})")
    assert not offenders, "\n".join(offenders)


def test_imports_within_the_package_are_absolute() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        for node, name in imports(module)
        if name.startswith(".")
    ]
    assert not offenders, "\n".join(offenders)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module.name: set(own_imports(module)) for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_packages_import_each_other_in_a_circle() -> None:
    """A folder and a folder inside it count as one package here: the first explains the second."""
    graph: dict[str, set[str]] = {}
    for module in modules():
        own = package(module.name)
        targets = {package(target) for target in own_imports(module)}
        graph.setdefault(own, set()).update(
            target for target in targets if not _one_holds_the_other(own, target)
        )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle among packages: " + " <- ".join(error.args[1]))


def _one_holds_the_other(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def test_no_module_of_the_control_plane_names_torch() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        if module.layer in WITHOUT_TORCH
        for node, name in imports(module)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not offenders, "\n".join(offenders)


def test_importing_the_control_plane_does_not_import_torch() -> None:
    names = [module.name for module in modules() if module.layer in WITHOUT_TORCH]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "torch was imported"
