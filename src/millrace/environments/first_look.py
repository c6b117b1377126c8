"""What a run would meet in its task and reward, looked at once before the run starts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from millrace.core.errors import DataError
from millrace.core.types import BadPrompt, Prompt
from millrace.environments.rows import find_column
from millrace.environments.scores import encodable
from millrace.environments.tasks import PROBED_ROWS
from millrace.environments.worker import EnvironmentWorker

TRIED_ROWS = 3
LOOK_S = 10.0
"""After which rows are asked for only until one is usable: a task may make its rows slowly."""


class TriedCompletion(msgspec.Struct, frozen=True):
    """A completion of a row to score. `kind` says in words what it is."""

    group_id: int
    row_id: str
    kind: str
    tokens: list[int]


class TaskSeen(msgspec.Struct, frozen=True):
    """The first usable prompt in the order of the run; attempts at it and at the next ones; and of the first
    `num_probed` rows those that are unusable, with the reason of the first of them."""

    prompt: Prompt
    attempts: list[TriedCompletion]
    rows: int
    num_probed: int
    num_unusable: int
    why: str


class FirstLook(EnvironmentWorker):
    """Role `millrace.environments.first_look:FirstLook`: the worker of a run, asked before the run."""

    async def look(self) -> TaskSeen:
        """Raises: DataError: none of the first prompts can be used."""
        return await self._in_rows(self._look)

    def _look(self) -> TaskSeen:
        asked = list(self._probed())
        usable = [prompt for prompt in asked if isinstance(prompt, Prompt)]
        unusable = [prompt.reason for prompt in asked if isinstance(prompt, BadPrompt)]
        if not usable:
            raise DataError(f"none of the first {len(asked)} prompts can be used; the first: {unusable[0]}")
        why = unusable[0] if unusable else ""
        attempts = [attempt for prompt in usable[:TRIED_ROWS] for attempt in self._attempts(prompt)]
        return TaskSeen(usable[0], attempts, self._task.rows, len(asked), len(unusable), why)

    def _probed(self) -> Iterator[Prompt | BadPrompt]:
        until_s, found = time.monotonic() + LOOK_S, False
        for group_id in range(min(self._task.rows, PROBED_ROWS)):
            prompt = self._prompt(group_id)
            yield prompt
            found = found or isinstance(prompt, Prompt)
            if found and time.monotonic() >= until_s:
                return

    def _attempts(self, prompt: Prompt) -> Iterator[TriedCompletion]:
        """Texts that any reward should have an opinion of: a right answer, none, and some text."""
        texts = {"an empty completion": "", "the prompt as a completion": prompt.text}
        if self._task.answer is not None:
            answer = find_column(self._task.columns(self._row(prompt.group_id)), self._task.answer)
            texts = {"the reference answer": str(answer), **texts}
        room = self._config.sampling.max_tokens
        characters = room * self._characters_per_token  # no tokens are made of megabytes
        for kind, text in texts.items():
            tokens = self._tokenizer.encode(encodable(text[:characters]), add_special_tokens=False)[:room]
            yield TriedCompletion(prompt.group_id, prompt.row_id, kind, tokens)
