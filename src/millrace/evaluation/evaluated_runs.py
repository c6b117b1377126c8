"""What an evaluation has to do with a run: it leaves out the prompts that the run was trained on, and is
kept in the run's directory. Its page draws it over the curve of rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.config.schema import Config
from millrace.core.errors import DataError, StorageError, writing
from millrace.core.types import Prompt
from millrace.estimates.evaluation import Evaluation
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.models import origin
from millrace.run_directory.run_directory import RunDirectory, read_parent


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


# ---------------------------------------------------------------- prompts of the training


@dataclass
class TrainedOn:
    """`run` and its parents were trained on `keys`: texts of prompts. With an environment they are digests of
    rows, because prompts of other episodes may have the same text. `left_out`: rows that were left out."""

    run: str
    keys: frozenset[str]
    by_row: bool
    left_out: set[str] = field(default_factory=set)

    def leaves_out(self, prompt: Prompt) -> bool:
        known = (prompt.row_digest if self.by_row else prompt.text) in self.keys
        if known:
            self.left_out.add(prompt.row_id)
        return known

    def refuse_if_none(self, prompts: list[Prompt]) -> None:
        """Raises: DataError: every prompt was left out."""
        if not prompts and self.left_out:
            raise DataError(
                f"{self.run} was trained on each of the {len(self.left_out)} prompts of the task that can be "
                "used: no prompt is left to evaluate on.\n  Name other rows: `--set task.path=FILE`, or "
                "`--data-seed N` for a gym task. Or take these: `--with-trained`, "
                "in Python `with_trained=True`"
            )

    def __str__(self) -> str:
        return f"{len(self.left_out)} prompts were left out, because {self.run} was trained on them"


def trained_on(model: Path, config: Config) -> TrainedOn | None:
    """What the run of a model, or of a checkpoint, was trained on up to then. None: it is no run's."""
    owner = origin(model)
    if owner is None:
        return None
    by_row = config.reward.kind == "environment"
    keys = (key for run, version in _lineage(*owner) for key in _keys(run, version, by_row))
    return TrainedOn(str(owner[0].path), frozenset(keys), by_row)


def _lineage(run: RunDirectory, version: int) -> Iterator[tuple[RunDirectory, int]]:
    """The run and its parents, as far as they are still there."""
    yield run, version
    parent = read_parent(run)
    while parent is not None and RunDirectory(Path(parent.path)).ledger.is_file():
        yield RunDirectory(Path(parent.path)), parent.version
        parent = parent.parent


def _keys(run: RunDirectory, version: int, by_row: bool) -> set[str]:
    with LedgerReader(run.ledger) as reader:
        return reader.trained_prompts(version, by_row=by_row)
