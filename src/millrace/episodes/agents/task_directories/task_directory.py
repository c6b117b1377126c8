"""A task as a directory in Harbor's format: instruction.md, task.toml, environment/ and tests/test.sh."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from millrace.core import files
from millrace.core.errors import DataError
from millrace.episodes.agents.task_directories.container_paths import for_agent, link_inside
from millrace.episodes.agents.task_directories.dockerfile import (
    WHOLE,
    LeftOut,
    PlainImage,
    needs_container,
    read_dockerfile,
)

TIMEOUT_S = 600.0
"""Harbor's default, for the agent and for the tests."""
TEXT_BYTES_MAX = 2**20
INSTALLS = re.compile(r"^.*\b(apt-get|apt|apk|yum|dnf)\s+(-\S+\s+)*(install|add|update)\b.*$", re.MULTILINE)
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


class TaskDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was read. `memory_mb` is None where the task names none.

    In `instruction`, files of the working directory have relative paths, if no container is started.

    `image` says which files the working directory gets; None: a container has them.
    """

    path: Path
    instruction: str
    test_script: Path
    agent_timeout_s: float
    test_timeout_s: float
    memory_mb: int | None
    test_environment: dict[str, str]
    image: PlainImage | None

    def lay_out(self, directory: Path) -> None:
        """Copy the files of the environment into a working directory. Raises: DataError, OSError."""
        top = self.path / "environment"
        if self.image is None or not top.is_dir():
            return
        left_out = LeftOut(top)
        for copied in self.image.copies:
            sources = [top] if copied.source in (".", "./") else sorted(top.glob(copied.source))
            sources = [source for source in sources if source == top or not left_out.has(source)]
            if not sources:
                raise DataError(f"{top}/Dockerfile copies {copied.source!r}, and there is no such file")
            for source in sources:
                target = directory / copied.target
                if source.is_dir():
                    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=left_out.names)
                else:
                    target = target / source.name if copied.into else target
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target, follow_symlinks=False)
        if self.image.path != "/":
            link_inside(directory, self.image.path)


def read_task(path: Path | str, *, in_container: bool = False) -> TaskDirectory:
    """Read a task.

    Args:
        in_container: the agent's command starts the task's container by itself.
    Raises:
        DataError: a file is missing or wrong, or the task needs a container that nothing starts.
    """
    path = Path(path).absolute()
    instruction = _text(path / "instruction.md")
    test_script = path / "tests" / "test.sh"
    script = _text(test_script)
    table = _table(path / "task.toml")
    environment = _section(path, table, "environment")
    tests = _section(path, table, "verifier")
    if not in_container:
        _refuse_container(path, environment)
        if install := INSTALLS.search(script):
            raise needs_container(test_script, install[0].strip(), "packages of the system")
    dockerfile = path / "environment" / "Dockerfile"
    plain = read_dockerfile(dockerfile) if not in_container and dockerfile.exists() else WHOLE
    return TaskDirectory(
        path=path,
        instruction=instruction if in_container else for_agent(instruction, plain.path),
        test_script=test_script,
        agent_timeout_s=_seconds(path, "agent", _section(path, table, "agent")),
        test_timeout_s=_seconds(path, "verifier", tests),
        memory_mb=_memory_mb(path, environment),
        test_environment=_variables(path, tests),
        image=None if in_container else plain,
    )


def _refuse_container(path: Path, environment: dict[str, Any]) -> None:
    if image := environment.get("docker_image"):
        raise needs_container(path / "task.toml", f"docker_image = {image!r}", "an image")
    for name in COMPOSE:
        if (path / "environment" / name).exists():
            raise needs_container(path / "environment" / name, "services", "several containers")


def _text(path: Path) -> str:
    try:
        text = files.read(path, TEXT_BYTES_MAX).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"there is no file {path}. A task directory has instruction.md and tests/test.sh, and perhaps "
            "task.toml and environment/."
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text in UTF-8") from None
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def _table(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path} is not valid TOML: {error}") from None


def _section(path: Path, table: dict[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise DataError(f"{path}/task.toml: `{name}` must be a table, and is {section!r}")
    return section


def _seconds(path: Path, name: str, section: dict[str, Any]) -> float:
    value = section.get("timeout_sec", TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e7:
        raise DataError(f"{path}/task.toml: `{name}.timeout_sec` must be a positive number, and is {value!r}")
    return float(value)


def _memory_mb(path: Path, environment: dict[str, Any]) -> int | None:
    """Harbor has `memory_mb = 2048`, and had `memory = "2G"`."""
    value = environment.get("memory_mb", environment.get("memory"))
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (
        found := re.fullmatch(r"(\d+)\s*([MG])i?B?", value.strip(), re.IGNORECASE)
    ):
        return int(found[1]) * (1024 if found[2].upper() == "G" else 1)
    raise DataError(f"{path}/task.toml: the memory {value!r} is not understood: write `memory_mb = 2048`")


def _variables(path: Path, tests: dict[str, Any]) -> dict[str, str]:
    variables = tests.get("env", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise DataError(f"{path}/task.toml: `verifier.env` must be a table of texts, and is {variables!r}")
    for name, value in variables.items():
        if "${" in value:
            raise DataError(
                f"{path}/task.toml: `verifier.env.{name}` takes {value!r} from the variables of the run, "
                "which tests do not see. Write the value, or set the variable for the agents of the run."
            )
    return dict(variables)
