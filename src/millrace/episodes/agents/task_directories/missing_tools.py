"""What the tests of a task need and this machine has not: commands, modules of Python, plugins of pytest.

Tests that cannot run often write the reward 0. This is no verdict on what the agent did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millrace.core import files
from millrace.core.errors import DataError

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
