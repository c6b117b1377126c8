"""The Dockerfile builds from files that are there, with what the project asks for. Nothing here runs it."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
import zipfile
from pathlib import Path

import typer
from hatchling.builders.wheel import WheelBuilder

from millrace.cli.app import app
from tests.tidy.sources import ROOT, tracked_files

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STEPS = [
    step.split(maxsplit=1)
    for step in re.sub(r"\\\n", " ", TEXT).splitlines()
    if step and not step.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IGNORE = shutil.ignore_patterns("__pycache__")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def of(kind: str) -> list[str]:
    return [rest for name, rest in STEPS if name == kind]


def test_every_step_is_one_that_docker_knows() -> None:
    known = {"FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in STEPS} <= known and STEPS[0][0] == "FROM"


def test_what_is_copied_is_tracked_and_not_ignored() -> None:
    tracked = {str(path.relative_to(ROOT)) for path in tracked_files()}
    sources = [word for copy in of("COPY") for word in copy.split()[:-1]]
    assert sources
    for source in sources:
        assert source in tracked or any(name.startswith(f"{source}/") for name in tracked), source
        assert source not in IGNORED


def test_everything_that_the_build_reads_is_copied() -> None:
    copied = {word for copy in of("COPY") for word in copy.split()[:-1]}
    assert {"pyproject.toml", "src", PROJECT["readme"], "LICENSE"} <= copied


def test_a_wheel_can_be_built_from_what_is_copied_alone(tmp_path: Path) -> None:
    for copy in of("COPY"):
        *sources, to = copy.split()
        for source in sources:
            place = tmp_path / to.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=IGNORE, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, place)
    build = WheelBuilder(str(tmp_path / "src")).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(next(iter(build))).namelist()
    assert "millrace/cli/app.py" in names and "millrace/quickstart/quickstart.toml" in names


def test_python_torch_and_the_extra_are_what_the_project_asks_for() -> None:
    (base,) = of("FROM")
    version = re.fullmatch(r"python:3\.(\d+)-slim", base)
    least = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])
    assert version and least and int(version[1]) >= int(least[1])
    asked = next(one for one in PROJECT["dependencies"] if one.startswith("torch"))
    runs = " ".join(of("RUN"))
    (torch,) = [word for word in shlex.split(runs) if word.startswith("torch")]
    assert set(torch[len("torch") :].split(",")) == set(asked[len("torch") :].replace(" ", "").split(","))
    for extra in re.findall(r"/src\[([\w,]+)\]", runs)[0].split(","):
        assert extra in PROJECT["optional-dependencies"]


def test_it_begins_with_the_project_s_command_and_not_as_root() -> None:
    (entry,) = of("ENTRYPOINT")
    assert entry == '["millrace"]' and "millrace" in PROJECT["scripts"]
    assert of("USER")[-1] in " ".join(of("RUN"))
    assert [name for name, _ in STEPS].index("USER") < [name for name, _ in STEPS].index("ENTRYPOINT")


def test_the_commands_of_its_first_lines_exist() -> None:
    group = typer.main.get_command(app)
    asked = re.findall(r"docker run .* millrace ([a-z]+)", TEXT)
    assert asked and set(asked) <= set(group.commands)  # type: ignore[attr-defined]
