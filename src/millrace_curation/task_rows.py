"""The rows of a configuration's task, and the texts of evaluation sets, as filters take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from string import Formatter
from typing import Any

from millrace.config.schema import Config
from millrace.config.tables.task import GymTaskSection, MixtureTaskSection, RowsSection
from millrace.conversations.tokenizer import encode, encode_prompt
from millrace.core.errors import ConfigError, DataError
from millrace.tasks.chat import as_messages, find_reference
from millrace.tasks.rows import Row, find_column, open_rows
from millrace.tasks.tasks import Task, make_task
from millrace_curation.candidate import CandidateRow
from millrace_curation.filters import EvaluationText

EVERY_ROWS = 200


def read_candidates(
    config: Config, tokenizer: Any, on_progress: Callable[[int, int], None] = lambda ended, total: None
) -> list[CandidateRow]:
    """Every row of the task, in the order of the file. A row that makes no prompt has a `fault`.

    Raises: ConfigError, DataError: the task has no rows of its own, or no usable row at all.
    """
    if isinstance(config.task, MixtureTaskSection):
        raise ConfigError(
            '`task.kind` is "mixture": curate its parts one by one, each with a configuration of its own'
        )
    if isinstance(config.task, GymTaskSection):
        raise ConfigError(
            '`task.kind` is "gym": its rows are made when they are needed, and there is no file to curate.\n'
            '  Curate a task of kind "file" or "function"'
        )
    task = make_task(config.task, tokenizer)
    rows = []
    for index in range(task.rows):
        rows.append(_candidate(config.task, task, tokenizer, index))
        if (index + 1) % EVERY_ROWS == 0 or index + 1 == task.rows:
            on_progress(index + 1, task.rows)
    return rows


def read_evaluation_texts(argument: str, column: str) -> Iterator[EvaluationText]:
    """The texts of an evaluation set: FILE, with prompts in `column`, or FILE:COLUMN.

    Raises: DataError: there is no file, or no such column, or a row is broken.
    """
    path, named = argument, column
    if not Path(path).exists():
        path, _, named = argument.rpartition(":")
    if not path or not Path(path).exists():
        raise DataError(
            f"no data at {argument!r} (looked in {Path.cwd()}): `--against` takes FILE or FILE:COLUMN"
        )
    rows = open_rows(path, (named,))
    for index in range(len(rows)):
        text = plain_text(value := as_messages(find_column(rows[index], named)))
        source = f"{Path(path).name}:{rows.place(index)}"
        if text is None:
            found = "nothing" if value is None else f"a {type(value).__name__}"
            raise DataError(
                f"{source} has {found} as `{named}`, only {sorted(rows[index])}.\n"
                f"  Name the column with the text: --against {path}:COLUMN"
            )
        yield EvaluationText(source, text)


def plain_text(value: Any) -> str | None:
    """A text as it is, and of chat messages their contents. None: it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "\n".join(str(one.get("content") or "") for one in value)
    return None


def _candidate(config: RowsSection, task: Task, tokenizer: Any, index: int) -> CandidateRow:
    row_id = task.row_id(index)
    try:
        columns, prompt = task.columns(index), task.prompt_text(index)
        encoder = encode if task.is_chat(index) else encode_prompt  # a template writes special tokens itself
        tokens = encoder(tokenizer, prompt)
    except DataError as error:
        return CandidateRow(index, row_id, fault=str(error))
    except Exception as error:  # a row, a template or a tokenizer may raise anything
        return CandidateRow(index, row_id, fault=f"{row_id}: {type(error).__name__}: {error}")
    answer = None if task.answer is None else str(find_reference(columns, task.answer))
    return CandidateRow(index, row_id, columns, _compared(config, columns, prompt), prompt, tokens, answer)


def _compared(config: RowsSection, columns: Row, prompt: str) -> str:
    """The prompt's column, unless the template adds other columns of the row."""
    value = find_column(columns, config.prompt)
    fields = {name for _, name, _, _ in Formatter().parse(config.template) if name is not None}
    text = plain_text(value)
    return prompt if text is None or (isinstance(value, str) and fields - {"prompt"}) else text
