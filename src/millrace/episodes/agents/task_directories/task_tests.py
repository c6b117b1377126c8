"""The reward of a task directory: tests/test.sh runs where the agent worked, and writes a number. Whether
this machine has what the tests need is looked at before.

Tests that cannot run often write the reward 0. This is no verdict on what the agent did.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millrace.core import files
from millrace.core.errors import DataError, RewardError
from millrace.episodes.agents.agent_process import MEMORY_MB, AgentEnd, AgentLimits
from millrace.episodes.agents.agents import Agents
from millrace.episodes.agents.task_directories.container_paths import (
    HOME,
    places_of,
    rewrite,
    with_places,
)
from millrace.episodes.agents.task_directories.task_directory import TaskDirectory

LOG_BYTES_MAX = 2**26
NOTES, HANDLER = "missing-commands", "missing-commands.sh"
_FUNCTION = """command_not_found_handle() {{
    printf '%s\\n' "$1" >> '{notes}'
    printf '%s: command not found\\n' "$1" >&2
    return 127
}}
"""
_RUN = re.compile(r"^\S*python[\d.]*: No module named '?([\w.-]+)", re.MULTILINE)
_IMPORT = re.compile(r"^(?:E\s+)?ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_OPTION = re.compile(r"^.*\bpytest: error: unrecognized arguments: (.+)", re.MULTILINE)
_PLACE = re.compile(r'^\s*File "([^"]+)", line|^(\S+):\d+: in ', re.MULTILINE)
_OWN = ("<stdin>", "<string>")
"""Names of programs that a shell script holds."""


def noted_commands(private: Path) -> dict[str, str]:
    """Variables with which bash notes each command that is missing. `private`: a directory for the notes."""
    handler = private / HANDLER
    handler.write_text(_FUNCTION.format(notes=private / NOTES))
    return {"BASH_ENV": str(handler)}


def missing_tools(private: Path, log: Path, tests: Path, instruction: str) -> list[str]:
    """What tests that have ended did without. What the instruction names is the agent's to make.

    Args:
        private: as of `noted_commands`.
        log: what the tests printed.
        tests: their directory.
    """
    notes = private / NOTES
    commands = notes.read_text(errors="replace").split("\n") if notes.is_file() else []
    printed = ""
    with suppress(OSError, DataError):  # tests may remove it
        printed = files.read(log, LOG_BYTES_MAX).decode(errors="replace")
    commands = [one for one in commands if one and not _names(instruction, one)]
    modules = [one for one in _modules(printed, tests) if not _names(instruction, one)]
    missing = [f"the command `{one}`" for one in commands]
    missing += [f"a pytest that takes `{one[1].strip()}`" for one in _OPTION.finditer(printed)]
    return list(dict.fromkeys([*missing, *(f"the Python module `{one}`" for one in modules)]))


def _names(instruction: str, tool: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(tool)}(?![\w-])", instruction) is not None


def _modules(printed: str, tests: Path) -> Iterator[str]:
    """Modules that a file of the tests imports, or that the tests run. What the agent's files import is not
    among them."""
    for run in _RUN.finditer(printed):
        yield run[1].split(".")[0]
    for error in _IMPORT.finditer(printed):
        places = [one[1] or one[2] for one in _PLACE.finditer(printed, 0, error.start())]
        file = places[-1] if places else ""
        if file in _OWN or f"{tests.parent.name}/{tests.name}/" in file:
            yield error[1].split(".")[0]


REWARD_BYTES_MAX = 2**20
WORDS = 500


def run_tests(agents: Agents, task: TaskDirectory, directory: Path) -> float:
    """Run the tests of a task after its agent has ended, and read the reward.

    The tests see a copy of tests/, which the agent has not seen. In a container, tests use the paths /tests,
    /logs and that of WORKDIR. In all texts of tests/, these paths become the directories of this trajectory
    (container_paths.py). What the agent left in logs/verifier is removed first.

    Args:
        directory: where the agent worked. The reward is read from its logs/verifier/reward.json: a number,
            or an object with `reward` or with one entry; or else from reward.txt there, as Harbor does it.
    Raises:
        RewardError: the tests wrote no reward, did not end, or needed what this machine has not.
        DataError: they name a path that no directory of the trajectory is.
    """
    if re.search(r"[^\w./-]", str(directory)):
        raise RewardError(f"tests cannot run in {str(directory)!r}: a shell would split or change this path")
    logs = directory / "logs" / "verifier"
    for path in (logs, logs.parent):
        if path.is_symlink() or path.is_file():
            path.unlink()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="tests-", dir=directory.parent) as private:
        tests = Path(private) / "tests"
        shutil.copytree(task.path / "tests", tests, symlinks=True)
        environment = task.test_environment
        if task.image is not None:
            names = [path.name for path in directory.iterdir()]
            places = places_of(task.image.path, directory, tests, logs.parent, names)
            rewrite(tests, places)
            environment = {name: with_places(value, places) for name, value in environment.items()}
            if task.image.path == HOME:
                environment = {"HOME": str(directory), **environment}
        end = agents.run_beside(
            _command(tests / "test.sh"),
            directory,
            log=logs / "test-stdout.txt",
            environment={**noted_commands(Path(private)), **environment},
            limits=AgentLimits(memory_mb=MEMORY_MB if task.memory_mb is None else task.memory_mb),
            timeout_s=task.test_timeout_s,
        )
        missing = missing_tools(Path(private), logs / "test-stdout.txt", tests, task.instruction)
    if end.killed:
        raise RewardError(
            f"the tests of {task.path} did not end within {task.test_timeout_s:g} s "
            f"(`verifier.timeout_sec`). They said: {end.last_words[-WORDS:].strip()}"
        )
    reward = _read_reward(task, logs, end)
    if reward < 1 and missing:
        raise RewardError(
            f"the tests of {task.path} could not run: this machine has not {', '.join(missing)}. They gave "
            f"{reward:g}, and said: {end.last_words[-WORDS:].strip()}"
        )
    return reward


def _command(script: Path) -> list[str]:
    """Bash runs a script, unless the first line names another interpreter than a shell."""
    first = script.read_bytes().split(b"\n", 1)[0].decode(errors="replace").strip()
    other = first.startswith("#!") and not re.search(r"\b(ba|da|z|k)?sh\b", first)
    return [str(script)] if other else ["bash", str(script)]


def _read_reward(task: TaskDirectory, logs: Path, end: AgentEnd) -> float:
    try:
        if os.path.lexists(logs / "reward.json"):
            value = files.read_json(logs / "reward.json", REWARD_BYTES_MAX)
            if isinstance(value, dict):
                value = (
                    value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
                )
        else:
            value = files.read(logs / "reward.txt", REWARD_BYTES_MAX).decode("utf-8-sig").strip()
        if isinstance(value, bool | str | int | float) and math.isfinite(reward := float(value)):
            return reward
        raise ValueError(f"{value!r} is no finite number")
    except FileNotFoundError:
        why = "they wrote neither logs/verifier/reward.txt nor reward.json"
    except KeyError:
        why = "reward.json has several entries, and none is `reward`"
    except (ValueError, DataError) as error:
        why = f"their reward cannot be read: {error}"
    how = end.signal or f"code {end.exit_code}"
    raise RewardError(
        f"the tests of {task.path} gave no reward: {why}. test.sh ended with {how}, and said: "
        f"{end.last_words[-WORDS:].strip() or 'nothing'}"
    )
