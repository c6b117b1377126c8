"""The columns of a group's row, read again from the task's data: a ledger keeps the prompt alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any

import msgspec

from millrace.config.schema import Config
from millrace.config.tables.task import FunctionTaskSection, HubTaskSection
from millrace.core.errors import MillraceError
from millrace.observe.shown_samples import clipped
from millrace.tasks.chat import find_reference
from millrace.tasks.hub import hub_file
from millrace.tasks.parts import Parts

WAIT_S = 0.6
"""A page waits so long for the task's data. Then it says that they are still read, and loads itself again."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """`answer` is the reference answer; None: the task has none. `columns` are the others, without the
    prompt. `unknown`: why nothing is known, in words. `again`: the data are still read."""

    answer: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    unknown: str = ""
    again: bool = False


class TaskRows:
    """The rows of a run's task. The first question begins to read the data, on a thread: that may
    take seconds. A user's function is never called, and nothing is fetched from a hub."""

    def __init__(self, config: Config, tokenizer: Callable[[], Any]) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._parts: Future[Parts] | None = None

    def row(self, group_id: int, row_id: str, prompt: str, wait_s: float | None = WAIT_S) -> TaskRow:
        """The row of a group. `wait_s` None: as long as it takes."""
        if why := _not_read(self._config):
            return TaskRow(unknown=f"The columns of the row are not recorded, and {why}.")
        if (tokenizer := self._tokenizer()) is None:
            return TaskRow(unknown="The columns of the row cannot be read: the model's tokenizer is gone.")
        if self._parts is None:
            self._parts = _begun(partial(Parts, self._config, tokenizer))
        try:
            parts = self._parts.result(wait_s)
            return self._row(parts, group_id, row_id, prompt)
        except TimeoutError:
            return TaskRow(unknown="The task's data are being read: the page loads itself again.", again=True)
        except MillraceError as error:
            return TaskRow(unknown=f"The columns of the row cannot be read: {error}")
        except Exception as error:  # a template, or a library that reads the data, may raise anything
            return TaskRow(unknown=f"The columns of the row cannot be read: {type(error).__name__}: {error}")

    def _row(self, parts: Parts, group_id: int, row_id: str, prompt: str) -> TaskRow:
        part, index = parts.locate(group_id)
        task = part.task
        adds = self._config.reward.kind == "environment"  # it writes into the prompt
        if part.row_id(index) != row_id or not (adds or task.prompt_text(index) == prompt):
            return TaskRow(unknown="The task's data were changed: this row had another prompt in the run.")
        columns = task.columns(index)
        answer = None if task.answer is None else find_reference(columns, task.answer)
        others = {
            name: _text(value) for name, value in columns.items() if name not in (task.prompt, task.answer)
        }
        return TaskRow(None if answer is None else _text(answer), others)


def _begun(read: Callable[[], Parts]) -> Future[Parts]:
    """The thread ends with the process, whatever it waits for."""
    future: Future[Parts] = Future()

    def work() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, name="task rows", daemon=True).start()
    return future


def _not_read(config: Config) -> str:
    """Why the data are not read, in words."""
    tasks = [part.one_task for part in config.by_part.values()]
    if any(isinstance(task, FunctionTaskSection) for task in tasks):
        return "the rows come from a function, which only a run calls"
    if any(isinstance(task, HubTaskSection) and not hub_file(task).exists() for task in tasks):
        return "this machine has no copy of the data set"
    return ""


def _text(value: Any) -> str:
    """A text as it is, and anything else as JSON. The middle of a long one is left out."""
    if isinstance(value, str):
        return clipped(value)
    try:
        return clipped(msgspec.json.encode(value, enc_hook=str).decode())
    except (TypeError, ValueError, RecursionError):
        return clipped(str(value))
