"""The core imports no wing: one table has what it asks for. A wing uses the face of the core alone."""

from __future__ import annotations

import re
from importlib.util import find_spec

from millrace.core.wings import TARGETS
from tests.tidy.sources import PACKAGE, ROOT, SOURCE, imports, modules
from tests.tidy.test_layers import WINGS, own_imports

FACE = ROOT / "tests" / "tidy" / "face.txt"
NAMES_WINGS = {"millrace.core.wings", "millrace.cli.app"}
"""The two tables: what the core asks for, and commands."""


def is_core(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def test_the_core_imports_no_wing() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        if is_core(module.name)
        for node, name in imports(module)
        if name.startswith(f"{PACKAGE}_")
    ]
    assert not offenders, "\n".join(offenders)


def test_the_core_names_wings_in_its_tables_alone() -> None:
    offenders = [
        f"{module.path.relative_to(ROOT)}: {found}"
        for module in modules()
        if is_core(module.name) and module.name not in NAMES_WINGS
        for found in re.findall(r'"millrace_\w+[.:][\w.:]+"', module.path.read_text(encoding="utf-8"))
    ]
    assert not offenders, "\n".join(offenders)


def test_every_name_of_the_table_is_there_and_is_asked_for() -> None:
    texts = {module.name: module.path.read_text(encoding="utf-8") for module in modules()}
    asked = "".join(text for name, text in texts.items() if name != "millrace.core.wings")
    for name, target in TARGETS.items():
        module, _, attribute = target.partition(":")
        bound = re.search(
            rf"^(?:async def|def|class) {attribute}\b|^{attribute}\b.* = ", texts[module], re.MULTILINE
        )
        assert bound, target
        assert f'"{name}"' in asked, f"nobody asks for {name}"


def test_wings_use_the_face_of_the_core_alone() -> None:
    """`face.txt` has the modules of the core that wings import. Whoever changes one looks at the wings."""
    used = {
        target
        for module in modules()
        if not is_core(module.name)
        for target in own_imports(module)
        if is_core(target)
    }
    listed = FACE.read_text(encoding="utf-8").split()
    assert listed == sorted(used), "write what is new into tests/tidy/face.txt, and take out what is unused"


def test_every_wing_is_installed_with_the_core() -> None:
    assert {path.parent.name for path in SOURCE.glob(f"{PACKAGE}_*/__init__.py")} == set(WINGS)
    assert all(find_spec(wing) is not None for wing in WINGS)
