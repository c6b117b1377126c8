"""Tasks: the sources of prompts. A task has rows; a row has columns and a prompt text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DataError
from millrace.tasks.arrow import ArrowRows
from millrace.tasks.chat import More, Tools, find_reference, is_messages, render, with_messages
from millrace.tasks.gym_task import GymTask
from millrace.tasks.hub import fetched_file
from millrace.tasks.rows import FunctionRows, Row, Rows, find_column, has_column, open_rows

PROBED_ROWS = 100

OfRows = table.FileTaskSection | table.HubTaskSection | table.FunctionTaskSection


class Task(Protocol):
    """`rows` is the number of rows; a row is an index below that number. A broken row raises DataError."""

    rows: int
    prompt: str  # the column with the prompt: see `rows.find_column`
    answer: str | None  # the column with the reference answer

    def row_id(self, row: int) -> str:
        """The name of the row in the ledger and in reports."""

    def columns(self, row: int) -> Row:
        """The columns, for rewards."""

    def prompt_text(self, row: int, more: More = "", tools: Tools = ()) -> str:
        """The text of the prompt with `more` behind it. A chat template renders it if the row `is_chat`, with
        `tools` behind the row's own."""

    def is_chat(self, row: int) -> bool:
        """Whether a chat template renders the prompt, which then has special tokens."""


def make_task(config: table.Task, tokenizer: Any) -> Task:
    """The task of a configuration. `tokenizer` (Hugging Face) renders chat prompts.

    Raises:
        ConfigError, DataError: the task has no usable prompt as configured.
    """
    if config.chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "`task.chat` is true, but the model's tokenizer has no chat template: set it to false"
        )
    kind: Any = GymTask if isinstance(config, table.GymTaskSection) else RowsTask
    task: Task = kind(config, tokenizer)
    first_usable(task)
    return task


class RowsTask:
    """Rows of files, of a hub, or of a user's function. A broken row raises an error with its place when it
    is read; the other rows are used."""

    def __init__(self, config: OfRows, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._rows, self._source = _rows_of(config)
        self.rows, self.prompt, self.answer = len(self._rows), config.prompt, config.answer

    def row_id(self, row: int) -> str:
        return f"{self._source}:{self._rows.place(row)}"

    def columns(self, row: int) -> Row:
        columns = self._rows[row]
        for key, name, find in (
            ("task.prompt", self._config.prompt, find_column),
            ("task.answer", self._config.answer, find_reference),
        ):
            columns = columns if name is None else with_messages(columns, name)
            if name is not None and find(columns, name) is None:
                raise DataError(f"{self.row_id(row)} {_lacks(columns, key, name)}")
        return columns

    def prompt_text(self, row: int, more: More = "", tools: Tools = ()) -> str:
        columns = self.columns(row)
        return render(
            self._config,
            self._tokenizer,
            columns,
            find_column(columns, self._config.prompt),
            self.row_id(row),
            more,
            tools,
        )

    def is_chat(self, row: int) -> bool:
        return self._config.chat or is_messages(find_column(self.columns(row), self._config.prompt))


def _rows_of(config: OfRows) -> tuple[Rows, str]:
    """The rows, and the name that they have in ids."""
    match config:
        case table.FileTaskSection():
            return open_rows(config.path, (config.prompt, config.answer)), Path(config.path).name
        case table.HubTaskSection():
            return ArrowRows(fetched_file(config)), f"{config.name}/{config.split}"
    return FunctionRows(config.path), Path(config.path).name


def _lacks(columns: Row, key: str, name: str) -> str:
    none = ', or set it to "none" where no row has an answer' if key == "task.answer" else ""
    if find_column(columns, name) is not None:
        return f"has no assistant's message at the end of `{name}`, which is the reference answer{none}"
    if has_column(columns, name):
        return f"has nothing (null) as `{name}`: give it a value or leave the row out{none}"
    unnamed = not all(str(one).replace(" ", "_").isidentifier() for one in columns)
    hint = ". The first line of a CSV or TSV file has to name its columns" if unnamed else ""
    return f"has no `{name}`, only {sorted(columns)}: name the right column as `{key}`{none}{hint}"


def first_usable(task: Task) -> Row:
    """The columns of the first row that makes a prompt.

    Raises:
        DataError: none of the first rows makes a prompt. Then the configuration is wrong, not a row.
    """
    faults = []
    for row in range(min(task.rows, PROBED_ROWS)):
        try:
            task.prompt_text(row)
            return task.columns(row)
        except DataError as error:
            faults.append(error)
    raise DataError(
        f"none of the first {len(faults)} rows can be used; the first says: {faults[0]}"
    ) from faults[0]
