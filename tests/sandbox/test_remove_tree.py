"""Directories that agents and programs leave are removed, whoever else removes them at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.episodes.agents.agent_process import remove_directory
from millrace_sandbox.inside import warden


class Killed(BaseException):
    """As by SIGKILL: nothing is tidied up."""


def agents(base: Path) -> Path:
    for name in "1", "2", "3":
        deep = base / "agents" / f"agent-{name}" / "work" / "deeper"
        deep.mkdir(parents=True, exist_ok=True)
        (deep / "file").touch()
        (deep.parent / "file").touch()
    return base / "agents"


def before(call: str, first: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`first` comes before the first `os.{call}` of a removal."""
    real, pending = getattr(os, call), [first]

    def patched(*args: object, **named: object) -> object:
        while pending:
            pending.pop()()
        return real(*args, **named)

    monkeypatch.setattr(warden.os, call, patched)


@pytest.mark.parametrize("call", ["chmod", "rename", "unlink", "rmdir"])
def test_what_a_killed_removal_left_is_removed_by_the_next(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = agents(tmp_path)

    def kill() -> None:
        raise Killed

    before(call, kill, monkeypatch)
    with pytest.raises(Killed):
        remove_directory(top)
    remove_directory(agents(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["chmod", "rename", "unlink", "rmdir"])
def test_another_may_remove_the_same_agents_at_the_same_time(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wardens do, whose worker was killed."""
    top = agents(tmp_path)
    before(call, lambda: shutil.rmtree(top / "agent-1", ignore_errors=True), monkeypatch)
    remove_directory(top)
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    (mine / "thesis").touch()
    (tmp_path / "agents").symlink_to(mine)
    remove_directory(tmp_path / "agents")
    assert (mine / "thesis").exists() and mine.stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "agents").is_symlink()
