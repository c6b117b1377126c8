"""Dockerfiles that only copy files: what they copy, and where to. All others need a container."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from millrace.core import files
from millrace.core.errors import DataError
from millrace.episodes.agents.task_directories.container_paths import WORKDIR

BYTES_MAX = 2**20


class CopiedFiles(msgspec.Struct, frozen=True):
    """`source` is a pattern below the directory `environment`. `target` is relative to the working directory.
    `into`: the target is a directory."""

    source: str
    target: str
    into: bool


class PlainImage(msgspec.Struct, frozen=True):
    """`workdir` is the absolute path that the working directory has in a container; empty: none is named."""

    workdir: str
    copies: tuple[CopiedFiles, ...]

    @property
    def path(self) -> str:
        """The working directory that the task's texts mean."""
        return posixpath.normpath(self.workdir or WORKDIR)


WHOLE = PlainImage("", (CopiedFiles(".", ".", True),))
"""Without a Dockerfile, all files of the environment are copied."""


def read_dockerfile(path: Path) -> PlainImage:
    """Raises: DataError: the image holds more than copied files, so that a container is needed."""
    try:
        text = files.read(path, BYTES_MAX).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text in UTF-8") from None
    workdir, bases = "", 0
    copies: list[tuple[list[str], str, str]] = []
    for instruction, rest in _instructions(text):
        match instruction:
            case "FROM":
                bases += 1
                if bases > 1 or "/" in rest.split()[-1] or " " in rest.strip():
                    raise needs_container(path, f"FROM {rest}", "an image that others have filled")
            case "WORKDIR":
                workdir = posixpath.join(workdir or "/", rest.strip().strip("\"'"))
            case "COPY":
                *sources, target = _operands(path, rest)
                copies.append((sources, target, workdir))
            case _:
                raise needs_container(path, f"{instruction} {rest}", "more than FROM, WORKDIR and COPY")
    return PlainImage(workdir, tuple(_copied(path, copies, workdir)))


class LeftOut:
    """What is not copied of a directory: the Dockerfile, and what .dockerignore names.

    The last pattern that fits counts; behind `!` is what stays. `*` is within a name, and `**/` any folders.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        path = top / ".dockerignore"
        text = files.read(path, BYTES_MAX).decode("utf-8-sig") if path.is_file() else ""
        lines = [line.strip() for line in text.split("\n")]
        patterns = [line for line in lines if line and not line.startswith("#")]
        self._keeps = any(one.startswith("!") for one in patterns)
        self._patterns = [(_ignored(one.lstrip("!")), one[0] != "!") for one in ("Dockerfile", *patterns)]

    def has(self, path: Path) -> bool:
        name, left_out = path.relative_to(self._top).as_posix(), path.name == ".dockerignore"
        for pattern, leaves_out in self._patterns:
            if pattern.fullmatch(name):
                left_out = leaves_out
        return left_out and not (self._keeps and path.is_dir())

    def names(self, directory: str, names: Sequence[str]) -> set[str]:
        """As `shutil.copytree` asks."""
        return {name for name in names if self.has(Path(directory) / name)}


def _ignored(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(posixpath.normpath(pattern.strip()).lstrip("/"))
    for text, meaning in ((r"\*\*/", "(?:.*/)?"), (r"\*\*", ".*"), (r"\*", "[^/]*"), (r"\?", "[^/]")):
        escaped = escaped.replace(text, meaning)
    return re.compile(f"{escaped}(?:/.*)?")


def needs_container(path: Path, line: str, why: str) -> DataError:
    return DataError(
        f"{path} asks for {why}: `{line[:100]}`. Millrace starts no containers: run the agent by a command "
        "of your own that starts one, or write a task whose Dockerfile only copies files."
    )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction in capitals, and the rest of its line. A backslash joins lines."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").split("\n"):
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def _operands(path: Path, rest: str) -> list[str]:
    """Sources and the target of COPY. Owner and mode are left out."""
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith(("--chown=", "--chmod=")):
            raise needs_container(path, f"COPY {flag} {rest}", "a copy from elsewhere")
        rest = rest.strip()
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise DataError(f"{path}: `COPY {rest}` cannot be read: {error}") from None
    if len(words) < 2 or "$" in rest or not all(isinstance(word, str) for word in words):
        raise needs_container(path, f"COPY {rest}", "a copy that is not plain")
    return list(words)


def _copied(path: Path, copies: list[tuple[list[str], str, str]], workdir: str) -> Iterator[CopiedFiles]:
    for sources, target, place in copies:
        whole = posixpath.normpath(posixpath.join(place or "/", target))
        inside = posixpath.relpath(whole, workdir or "/")
        line = f"COPY {' '.join(sources)} {target}"
        if inside.startswith("..") or (not workdir and target.startswith("/")):
            raise needs_container(path, line, "files outside of its WORKDIR")
        if any(".." in source.split("/") for source in sources):
            raise DataError(f"{path}: `{line}` copies from outside of the directory of the Dockerfile")
        into = target.endswith(("/", ".")) or len(sources) > 1
        yield from (CopiedFiles(source.lstrip("/") or ".", inside, into) for source in sources)
