"""Paths of a container in the texts of a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.episodes.agents.task_directories.container_paths import (
    for_agent,
    places_of,
    rewrite,
    with_places,
)

PLACES = {"/app": "/d/here", "/tests": "/d/tests", "/logs": "/d/logs"}


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("cd /app", "cd /d/here"),
        ("cat /app/a.txt /tests/b", "cat /d/here/a.txt /d/tests/b"),
        ("OUT=${OUT:-/app/a.txt}", "OUT=${OUT:-/d/here/a.txt}"),
        ("open('/app/a')", "open('/d/here/a')"),
        ('f"/app/{name}"', 'f"/d/here/{name}"'),
        ("--dir=/app", "--dir=/d/here"),
        ("gcc -I/app/include", "gcc -I/d/here/include"),
        ("PATH=/app/bin:/tests:$PATH", "PATH=/d/here/bin:/d/tests:$PATH"),
        ("file:///app/a", "file:///d/here/a"),
        (">/logs/verifier/reward.txt", ">/d/logs/verifier/reward.txt"),
        ("It is in /app.", "It is in /d/here."),
        ("sqlite:////app/a.db", "sqlite:////d/here/a.db"),
        ("保存到/app/a.txt中，在/app目录", "保存到/d/here/a.txt中，在/d/here目录"),
        ("- **/app/a.csv**: the table", "- **/d/here/a.csv**: the table"),
        ("/app", "/d/here"),
    ],
)
def test_a_path_of_the_container_becomes_the_place_of_this_trajectory(text: str, placed: str) -> None:
    assert with_places(text, PLACES) == placed


@pytest.mark.parametrize(
    "text",
    [
        "/app2",
        "/app-data",
        "/app.txt",
        "src/app",
        "./app",
        "../tests",
        "~/app",
        "$HOME/app",
        "${HOME}/app",
        '"$HOME"/app',
        "$(pwd)/app",
        "*/tests",
        "glob('**/app')",
        "sqlite:///app/a.db",
        "http://app/tests",
    ],
)
def test_another_path_stays(text: str) -> None:
    assert with_places(text, PLACES) == text


@pytest.mark.parametrize(
    ("text", "workdir", "shown"),
    [
        ("Write 391 into /app/answer.txt.", "/app", "Write 391 into answer.txt."),
        ("Work in `/app`, see /app/src/*.py.", "/app", "Work in `./`, see src/*.py."),
        ("Work in /app.", "/app", "Work in ./."),
        ("**/app/a.csv** and 文件/app/b.txt。", "/app", "**a.csv** and 文件b.txt。"),
        ("写入/answer.txt。", "/", "写入answer.txt。"),
        ("Work in /app/ now", "/app", "Work in ./ now"),
        ("See /srv/task/a and /app/b", "/srv/task", "See a and /app/b"),
        (
            "Write `/answer.txt`, not /tmp/x, with /usr/bin/sed",
            "/",
            "Write `answer.txt`, not /tmp/x, with /usr/bin/sed",
        ),
        ("Either and/or 1/2 of https://host/x", "/", "Either and/or 1/2 of https://host/x"),
    ],
)
def test_an_instruction_has_relative_paths(text: str, workdir: str, shown: str) -> None:
    assert for_agent(text, workdir) == shown


def test_all_texts_of_a_directory_are_rewritten_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    texts = [tmp_path / "run", tmp_path / "a" / "check.js", tmp_path / "a" / "b" / "paths.json"]
    for path in texts:
        path.write_text("/app/x\r\n")
    texts[0].chmod(0o755)
    for name, data in ("binary", b"/app\0"), ("latin", b"/app \xe9"), ("empty", b""):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link").symlink_to("/app")
    rewrite(tmp_path, PLACES)
    assert [path.read_bytes() for path in texts] == [b"/d/here/x\r\n"] * 3
    assert texts[0].stat().st_mode & 0o111
    assert (tmp_path / "binary").read_bytes() == b"/app\0"
    assert (tmp_path / "latin").read_bytes() == b"/app \xe9"
    assert (tmp_path / "link").readlink() == Path(PLACES["/app"])


def test_a_task_that_works_in_the_root_names_what_is_there() -> None:
    places = places_of(
        "/", Path("/d/here"), Path("/d/tests"), Path("/d/logs"), ["answer.txt", "tmp", "tests"]
    )
    assert (
        with_places("cat /answer.txt /tmp/x /tests/y", places) == "cat /d/here/answer.txt /tmp/x /d/tests/y"
    )
