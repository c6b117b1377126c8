"""Commands about checkpoints of the trainer in JAX, run by the Python that has JAX: `trainer.python`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import millrace
from millrace.core.errors import ConfigError, DataError


def has_jax() -> bool:
    return find_spec("jax") is not None and find_spec("orbax") is not None


def run_with_jax(python: str | None, *arguments: object) -> str:
    """Run a command of Millrace in `python`, the run's `trainer.python`. Returns what it prints.

    Raises: ConfigError: there is no such Python; DataError: the command has failed.
    """
    words = [str(argument) for argument in arguments]
    if python is None:
        raise ConfigError(
            f"`millrace {words[0]}` needs JAX and Orbax, which {sys.executable} does not have.\n"
            "  Use a Python that has them (`make setup-jax`): .venv-jax/bin/python -m millrace ..."
        )
    path = os.pathsep.join([str(Path(millrace.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [python, "-m", "millrace", *words]
    try:
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(f"`trainer.python` ({python}) cannot be started: {error.strerror}") from error
    if done.returncode:
        raise DataError(f"`trainer.python` ({python}): {done.stderr.strip()}")
    return done.stdout
