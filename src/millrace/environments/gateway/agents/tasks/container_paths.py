"""Paths of a container in a task's texts, and what they are where no container is.

A task says /app for its working directory, /tests for its tests and /logs for what these write. An agent and
its tests run in directories of their own, so each text of the task says these instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

WORKDIR = "/app"
"""The working directory of tasks that name none: that of Harbor's own tasks."""
TEXT_BYTES_MAX = 2**24
_SYSTEM = frozenset(
    {
        *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "media", "mnt", "opt", "proc"),
        *("root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    }
)
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
    marked = with_places(instruction, {workdir: "\0"})
    return re.sub(r"\0/?", "./", re.sub(r"\0/(?=[\w.*-])", "", marked))


def _names_below_root(text: str) -> set[str]:
    found = re.findall(r"(?<![\w.~}\])*/<:])/([A-Za-z_][\w.-]*\w)", text, re.ASCII)
    return set(found) - _SYSTEM


def rewrite(top: Path, places: Mapping[str, str]) -> None:
    """Put places into all texts below a directory. What is no text in UTF-8 stays; so does a link."""
    for path in top.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > TEXT_BYTES_MAX:
            continue
        data = path.read_bytes()
        try:
            text = data.decode() if b"\0" not in data else ""
        except UnicodeDecodeError:
            continue
        if (placed := with_places(text, places).encode()) != data and text:
            path.write_bytes(placed)


def places_of(workdir: str, directory: Path, tests: Path, logs: Path, names: Iterable[str]) -> dict[str, str]:
    """The place of each path that the tests of a task may use.

    Args:
        names: what is in the agent's directory. A task that works in / names these there.
    """
    places = {"/tests": str(tests), "/logs": str(logs)}
    if workdir == "/":
        return {**{f"/{name}": str(directory / name) for name in names if name not in _SYSTEM}, **places}
    return {**places, workdir: str(directory)}
