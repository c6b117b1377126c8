"""The version of a model on disk, in a small file beside the weights."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from millrace.core import files

FILE = "millrace.json"


def write(directory: Path, version: int) -> None:
    (directory / FILE).write_text(json.dumps({"version": version}) + "\n", encoding="utf-8")


def read(directory: Path) -> int:
    """-1: there is no model, or no version beside it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(files.read_json(directory / FILE)["version"])
    return -1
