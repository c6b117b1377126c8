"""The command line that the user typed, for hints."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def typed() -> str:
    """The command that started this process, for hints that a user can paste.

    `millrace` if the shell finds this program under that name, else its path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "millrace"])
    path = shutil.which("millrace")
    if program.name != "millrace" or (path is not None and Path(path).resolve() == program.resolve()):
        return "millrace"
    return shlex.quote(sys.argv[0])
