"""Tasks: the sources of prompts. A task has rows; a row has columns and a prompt text."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DataError
from millrace.environments.rows import FunctionRows, Row, find_column, has_column, open_rows

PROBED_ROWS = 100
CACHED_ROWS = 1024


class Task(Protocol):
    """`rows` is the number of rows; a row is an index below that number. A broken row raises DataError."""

    rows: int
    answer: str | None  # the column with the reference answer: see `rows.find_column`

    def row_id(self, row: int) -> str:
        """The name of the row in the ledger and in reports."""

    def columns(self, row: int) -> Row:
        """The columns, for rewards."""

    def prompt_text(self, row: int) -> str:
        """The text of the prompt, rendered through the chat template if the row `is_chat`."""

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


class GymTask:
    """A reasoning-gym data set. Each row is generated when it is needed.

    reasoning-gym seeds row i with `seed + i`, so neighbouring seeds share nearly all rows. So the golden
    ratio spreads seeds over 31 bits: small `data_seed`s are hundreds of thousands of rows apart, and a
    held-out set with another seed has other rows.
    """

    answer: str | None = "answer"

    def __init__(self, config: table.GymTaskSection, tokenizer: Any) -> None:
        self.rows = config.size
        self._config, self._tokenizer = config, tokenizer
        seed = config.data_seed * 2_654_435_769 % 2**31
        self.dataset = _gym_dataset(config.name, config.size, seed, config.options)
        self._cached = lru_cache(CACHED_ROWS)(self._generate)

    def row_id(self, row: int) -> str:
        return f"{self._config.name}/{self._config.data_seed}:{row}"

    def columns(self, row: int) -> Row:
        return self._cached(row)

    def prompt_text(self, row: int) -> str:
        columns = self.columns(row)
        return _render(self._config, self._tokenizer, columns, columns["question"], self.row_id(row))

    def is_chat(self, row: int) -> bool:
        return self._config.chat

    def _generate(self, row: int) -> Row:
        try:
            return self.dataset[row]
        except Exception as error:
            raise DataError(f"{self.row_id(row)}: not generated: {type(error).__name__}: {error}") from error


class RowsTask:
    """Rows of a file, or of a user's function. A broken row raises an error with its place when it is read;
    the other rows are used."""

    def __init__(self, config: table.FileTaskSection | table.FunctionTaskSection, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        is_file = isinstance(config, table.FileTaskSection)
        self._rows = open_rows(config.path) if is_file else FunctionRows(config.path)
        self.rows, self.answer = len(self._rows), config.answer

    def row_id(self, row: int) -> str:
        return f"{Path(self._config.path).name}:{self._rows.place(row)}"

    def columns(self, row: int) -> Row:
        columns = self._rows[row]
        for key, name in ("task.prompt", self._config.prompt), ("task.answer", self._config.answer):
            if name is not None and find_column(columns, name) is None:
                raise DataError(f"{self.row_id(row)} {_lacks(columns, key, name)}")
        return columns

    def prompt_text(self, row: int) -> str:
        columns = self.columns(row)
        return _render(
            self._config,
            self._tokenizer,
            columns,
            find_column(columns, self._config.prompt),
            self.row_id(row),
        )

    def is_chat(self, row: int) -> bool:
        return self._config.chat or _is_messages(find_column(self.columns(row), self._config.prompt))


def _lacks(columns: Row, key: str, name: str) -> str:
    none = ', or set it to "none" where no row has an answer' if key == "task.answer" else ""
    if has_column(columns, name):
        return f"has nothing (null) as `{name}`: give it a value or leave the row out{none}"
    return f"has no `{name}`, only {sorted(columns)}: name the right column as `{key}`{none}"


def _gym_dataset(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)[:3]
        raise ConfigError(
            f"`task.name` ({name!r}) is not a reasoning-gym data set. Nearest: {', '.join(near)} "
            f"({len(DATASETS)} in all)"
        )
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        fields = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"size", "seed"})
        raise ConfigError(
            f"`task.options` {options} do not fit reasoning-gym's `{name}` ({error}); "
            f"it knows {', '.join(fields)}"
        ) from error


def _render(config: table.Task, tokenizer: Any, columns: Row, prompt: Any, row_id: str) -> str:
    if isinstance(prompt, str):
        text = _fill(config.template, {**columns, "prompt": prompt}, row_id)
        messages = [{"role": "user", "content": text}]
        if not config.chat:
            return text
    elif _is_messages(prompt):
        messages = prompt
    else:
        kind = type(prompt).__name__
        raise DataError(f"{row_id}: the prompt is a {kind}: it must be text, or a list of chat messages")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{row_id}: the prompt has chat messages, and the model's tokenizer has no chat template.\n"
            "  Take a chat model, or give the prompt as text"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.chat_arguments
        )
    except Exception as error:
        raise DataError(f"{row_id}: the chat template failed: {type(error).__name__}: {error}") from error


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, dict) for one in prompt)


def _fill(template: str, columns: Row, row_id: str) -> str:
    try:
        return template.format(**columns)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{row_id}: `task.template` {template!r} cannot be filled ({type(error).__name__}: {error}); "
            f"columns: {sorted(columns)}. A literal brace is written {{{{ or }}}}."
        ) from error


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
