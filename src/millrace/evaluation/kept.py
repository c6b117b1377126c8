"""Evaluations of a run's models, kept in the run's directory. Its page draws them over the curve of
rewards."""

from __future__ import annotations

import json
from pathlib import Path

from millrace.core.errors import StorageError, writing
from millrace.estimates.evaluation import Evaluation
from millrace.run_directory.models import origin
from millrace.run_directory.run_directory import RunDirectory


def keep(run: RunDirectory, version: int, result: Evaluation) -> None:
    """Append a line to `evaluations.jsonl`. Raises StorageError."""
    line = {"version": version} | result.to_json()
    del line["model"]  # the version names the model, and the directory may vanish
    with (
        writing(run.evaluations, "The evaluation itself is done, but is not kept with its run."),
        run.evaluations.open("a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(line) + "\n")


def keep_if_of_a_run(model: Path, result: Evaluation) -> str:
    """Keep `result` if the model or checkpoint belongs to a run. Returns why keeping failed, or an empty
    text."""
    try:
        if owner := origin(model):
            keep(*owner, result)
    except StorageError as error:
        return str(error)
    return ""
