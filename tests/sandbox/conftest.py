"""Sandboxes of every level that this machine has, and things outside that attempts reach for."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.core.errors import SandboxError
from millrace_sandbox.sandbox import LEVELS, Sandbox


@pytest.fixture(scope="package")
def sandboxes() -> Iterator[dict[str, Sandbox | str]]:
    """The sandbox of each level, or why there is none."""
    made: dict[str, Sandbox | str] = {}
    for level in LEVELS:
        try:
            made[level] = Sandbox(level, strongest=level)
        except SandboxError as error:
            made[level] = str(error)
    yield made
    for one in made.values():
        if isinstance(one, Sandbox):
            one.close()


@pytest.fixture(params=LEVELS)
def any_level(request: pytest.FixtureRequest, sandboxes: dict[str, Sandbox | str]) -> Sandbox:
    return of_level(sandboxes, request.param)


@pytest.fixture(params=LEVELS[:2])
def isolated(request: pytest.FixtureRequest, sandboxes: dict[str, Sandbox | str]) -> Sandbox:
    return of_level(sandboxes, request.param)


@pytest.fixture
def bare(sandboxes: dict[str, Sandbox | str]) -> Sandbox:
    return of_level(sandboxes, "limits")


def of_level(sandboxes: dict[str, Sandbox | str], level: str) -> Sandbox:
    found = sandboxes[level]
    if isinstance(found, str):
        assert level != "limits", f"every machine has this level: {found}"
        pytest.skip(f"the level {level!r} cannot be had here: {found}")
    return found


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What attempts are told of the world outside. Nothing of it may change."""
    secret, writable = tmp_path / "secret", tmp_path / "writable"
    secret.write_text("word")
    writable.write_text("kept")
    tcp, unix, abstract = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    )
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"millrace-test-{os.getpid()}"
    path = f"/tmp/{name}.socket"
    unix.bind(path)
    abstract.bind(f"\0{name}")
    datagram.bind(f"\0{name}-datagram")
    unix.listen()
    abstract.listen()
    yield {
        "secret": str(secret),
        "word": "word",
        "writable": str(writable),
        "base": str(tmp_path),
        "home": str(Path.home()),
        "package": str(Path(millrace.__file__).parent),
        "shared": f"/dev/shm/{name}",
        "pid": os.getpid(),
        "port": tcp.getsockname()[1],
        "socket": path,
        "abstract": name,
    }
    for one in (tcp, unix, abstract, datagram):
        one.close()
    os.unlink(path)
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)
    Path(millrace.__file__).with_name("escape.py").unlink(missing_ok=True)
