"""Rows with the gold answer of another row: whatever a completion says, it deserves no reward."""

from __future__ import annotations

from millrace.core.errors import DataError
from millrace.environments.chat import More, Tools
from millrace.environments.rows import Row, find_column
from millrace.environments.stream.order import permuted
from millrace.environments.tasks import Task

TRIED = 64


class WrongGold:
    """A Task. Prompts are those of `task`. All other columns are another row's, so every kind of reward takes
    the wrong gold: an answer, tests, or what a gym scores by.

    The other row follows from the row alone, and its gold differs. A row without such another is broken.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.rows, self.prompt, self.answer = task.rows, task.prompt, task.answer

    def row_id(self, row: int) -> str:
        return f"canary/{self._task.row_id(row)}"

    def columns(self, row: int) -> Row:
        """Raises: DataError: no row that was tried has another gold."""
        own = self._task.columns(row)
        for turn in range(min(TRIED, self.rows)):
            other = permuted((row + turn) % self.rows, self.rows, "wrong-gold")
            columns = self._task.columns(other)
            if other != row and self._gold(columns) != self._gold(own):
                return {**columns, self.prompt: find_column(own, self.prompt)}
        raise DataError(f"{self.row_id(row)}: no other row has another gold answer, so none can be wrong")

    def prompt_text(self, row: int, more: More = "", tools: Tools = ()) -> str:
        self.columns(row)
        return self._task.prompt_text(row, more, tools)

    def is_chat(self, row: int) -> bool:
        return self._task.is_chat(row)

    def _gold(self, columns: Row) -> object:
        if self.answer is not None:
            return str(find_column(columns, self.answer)).strip()
        return {name: value for name, value in columns.items() if name != self.prompt}
