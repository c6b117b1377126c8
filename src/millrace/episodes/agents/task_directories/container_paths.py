"""Paths of a container in a task's texts, and what they are where no container is.

A task says /app for its working directory, /tests for its tests and /logs for what these write. An agent and
its tests run in directories of their own, so each text of the task says these instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from millrace.core.errors import DataError

WORKDIR = "/app"
"""The working directory of tasks that name none: that of Harbor's own tasks."""
HOME = "/root"
"""The home directory in a container."""
TEXT_BYTES_MAX = 2**24
OUTSIDE = "\0outside"
"""The place of a path that no directory of a trajectory is."""
_SYSTEM = frozenset(
    {
        *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "media", "mnt", "opt", "proc"),
        *("root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    }
)
SCRIPTS = (".sh", ".bash")
_BEHIND_VALUE = re.compile(r"([$]\w+|[})])[\"']\Z")
"""The end of a value that a path goes on, as in "$HOME"/app."""


def with_places(text: str, places: Mapping[str, str]) -> str:
    """The text with the place of each path, where a path begins so: /app is no part of /app2 or src/app.

    Before and behind it may be letters of scripts without spaces, and marks of bold text before it."""
    if not places:
        return text
    names = "|".join(re.escape(name) for name in sorted(places, key=len, reverse=True))
    begin = r"(?:(?<![\w.~}\])*/])|(?<=[\s\"']-[A-Za-z])|(?<=file://)|(?<=:///)|(?<=\s\*\*)|(?<=\A\*\*))"

    def placed(match: re.Match[str]) -> str:
        before = text[max(0, match.start() - 80) : match.start()]
        return match[0] if _BEHIND_VALUE.search(before) else places[match[1]]

    return re.sub(rf"{begin}({names})(?![\w-]|\.\w)", placed, text, flags=re.ASCII)


def for_agent(instruction: str, workdir: str) -> str:
    """An instruction in which files of the working directory have relative paths. These are the same for each
    agent, also for one that takes the place of another."""
    if workdir == "/":
        return with_places(instruction, {f"/{name}": name for name in _names_below_root(instruction)})
    if workdir == HOME:
        instruction = re.sub(r"(?<![\w./~])~(?=/)", HOME, instruction)
    marked = with_places(instruction, {workdir: "\0"})
    return re.sub(r"\0/?", "./", re.sub(r"\0/(?=[\w.*-])", "", marked))


def _names_below_root(text: str) -> set[str]:
    found = re.findall(r"(?<![\w.~}\])*/<:])/([A-Za-z_][\w.-]*\w)", text, re.ASCII)
    return set(found) - _SYSTEM


def rewrite(top: Path, places: Mapping[str, str]) -> None:
    """Put places into all texts and links below a directory. What is no text in UTF-8 stays.

    Scripts get what their systems of origin may lose: line ends of Unix, and the right to be run.

    Raises: DataError: a text names a path that no directory of a trajectory is.
    """
    for path in top.rglob("*"):
        if path.is_symlink():
            _link_anew(path, places)
            continue
        if not path.is_file() or path.stat().st_size > TEXT_BYTES_MAX:
            continue
        data = path.read_bytes()
        try:
            text = data.decode() if b"\0" not in data else ""
        except UnicodeDecodeError:
            continue
        placed = with_places(text, places)
        if OUTSIDE in placed:
            name = next(one for one, place in places.items() if place == OUTSIDE)
            raise DataError(
                f"{path.relative_to(top)} names {name}, which is outside of WORKDIR: this needs a container"
            )
        script = placed.removeprefix("\ufeff")
        if script.startswith("#!") or path.suffix in SCRIPTS:
            placed = script.replace("\r\n", "\n")
        if script.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
        if (written := placed.encode()) != data and text:
            path.write_bytes(written)


def _link_anew(path: Path, places: Mapping[str, str]) -> None:
    target = os.readlink(path)
    if (placed := with_places(target, places)) != target and OUTSIDE not in placed:
        path.unlink()
        path.symlink_to(placed)


def link_inside(directory: Path, workdir: str) -> None:
    """Let the links that lead into the working directory of a container lead into this one."""
    for path in directory.rglob("*"):
        target = PurePosixPath(os.readlink(path)) if path.is_symlink() else PurePosixPath(".")
        if target.is_relative_to(workdir):
            path.unlink()
            path.symlink_to(os.path.relpath(directory / target.relative_to(workdir), path.parent))


def places_of(workdir: str, directory: Path, tests: Path, logs: Path, names: Iterable[str]) -> dict[str, str]:
    """The place of each path that the tests of a task may use.

    Args:
        names: what is in the agent's directory. A task that works in / names these there.
    """
    places = {"/tests": str(tests), "/logs": str(logs)}
    if workdir == "/":
        return {**{f"/{name}": str(directory / name) for name in names if name not in _SYSTEM}, **places}
    parents = [str(one) for one in PurePosixPath(workdir).parents][:-1]
    outside = {} if not parents or parents[-1][1:] in _SYSTEM else dict.fromkeys(parents, OUTSIDE)
    return {**outside, **places, workdir: str(directory)}
