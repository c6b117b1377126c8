"""The project declares what it imports. The lock file pins what it needs, with digests, and names no place to
fetch it from."""

from __future__ import annotations

import re
import sys
import tomllib

from tests.tidy.sources import PACKAGE, ROOT, imports, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINNED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s;]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def name_of(requirement: str) -> str:
    return re.split(r"[\s<>=!~\[;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


IMPORTED_AS = {"orbax": "orbax-checkpoint"}
"""Packages whose distribution has another name."""


def test_everything_that_the_package_imports_is_declared() -> None:
    """What comes with another dependency today may not come with its next version."""
    own = {*sys.stdlib_module_names, PACKAGE}
    extras = (r for extra in PROJECT["optional-dependencies"].values() for r in extra)
    declared = {name_of(r) for r in [*PROJECT["dependencies"], *extras]}
    undeclared = {
        f"{module.at(node)}: {name}"
        for module in modules()
        for node, name in imports(module)
        if (root := name.partition(".")[0])
        and root not in own
        and not root.startswith(f"{PACKAGE}_")
        and IMPORTED_AS.get(root, name_of(root)) not in declared
    }
    assert not undeclared, "\n".join(sorted(undeclared))


def test_everything_that_the_project_needs_is_pinned() -> None:
    names = ("data", "gym", "json", "tensorboard", "dev", "ui-test")
    extras = (r for name in names for r in PROJECT["optional-dependencies"][name])
    needed = {name_of(r) for r in [*PROJECT["dependencies"], *extras]} - {"millrace"}
    assert needed <= {match[1].replace("_", "-") for match in PINNED.finditer(LOCK)}


def test_everything_that_is_pinned_has_digests() -> None:
    pins = list(PINNED.finditer(LOCK))
    assert len(pins) > 50
    assert not [match[1] for match in pins if "--hash=sha256:" not in match[3]]


def test_no_place_to_fetch_it_from_is_named() -> None:
    assert not re.search(r"https?://|file:|--index-url|--find-links|--extra-index-url", LOCK)
