"""The worker that tries a run's task and reward before the run starts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial

import msgspec

from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.call_forms import style_of
from millrace.conversations.call_reader import MARKS
from millrace.conversations.encoding import encodable
from millrace.conversations.tokenizer import encode
from millrace.core.errors import DataError
from millrace.core.types import BadPrompt, Prompt
from millrace.episodes.reward_worker import TaskRewardWorker
from millrace.rewards.reference_completions import ReferenceCompletion, told_references
from millrace.tasks.asked_row import row_digest
from millrace.tasks.chat import find_reference
from millrace.tasks.tasks import PROBED_ROWS

REPEATS_ROWS, REPEATS_S = 1000, 3.0
"""Among so many rows, or as many as there is time for, repeated prompts are counted."""
LOOK_S = 10.0
"""After so long, probing ends at the first usable row, because a task may make its rows slowly."""


REFERENCE = "the reference answer"

PROBED = -1
"""A trajectory whose agent starts for its first request alone."""


class TriedCompletion(msgspec.Struct, frozen=True):
    """A completion of a row to score. `kind` describes the completion in words. `full` and `member` are those
    of a `ReferenceCompletion`. `seen`: what the reward gets, after the tokenizer."""

    group_id: int
    row_id: str
    kind: str
    tokens: list[int]
    full: float | None = None
    member: str = ""
    seen: str = ""


class FirstLook(TaskRewardWorker):
    """Role `millrace.episodes.first_look:FirstLook`: the worker of a run, used before the run."""

    async def probed(self, first: int, any_usable: bool) -> AsyncIterator[Prompt | BadPrompt]:
        """The first prompts in the order of the run, from group `first` on. `any_usable`: an earlier prompt
        was usable."""
        until_s = time.monotonic() + LOOK_S
        for group_id in range(first, min(self._parts.rows, PROBED_ROWS)):
            [prompt] = await self.prompts([group_id], [[PROBED]])
            await self.forget([PROBED])
            yield prompt
            any_usable = any_usable or isinstance(prompt, Prompt)
            if any_usable and time.monotonic() >= until_s:
                return

    async def num_rows(self) -> int:
        return self._parts.rows

    async def notes(self) -> list[str]:
        """What a run with tools should know of the model's chat template."""
        if not isinstance(reward := self._config.reward, EnvironmentRewardSection) or self._episodes is None:
            return []
        style = style_of(self._tokenizer, self._config.one_task.chat_arguments, refuses=False)
        if not style.by_marks or not (reward.agent or self._episodes.schemas):
            return []
        return [
            "the chat template of the model (`model.path`) shows tools and writes no calls: a call counts if "
            f"it is JSON, alone or behind {', '.join(MARKS)}. Others are not seen: see docs/turns.md"
        ]

    async def prompt_keys(self) -> list[str]:
        """Of the first rows in the order of the run: the text of the prompt, as a digest. With an
        environment, the digest of the row, because prompts of other episodes may have the same text."""
        until_s, keys = time.monotonic() + REPEATS_S, list[str]()
        for group_id in range(min(self._parts.rows, REPEATS_ROWS)):
            with suppress(DataError):  # a row that makes no prompt
                keys.append(await self._in_rows(partial(self._key, group_id)))
            if time.monotonic() >= until_s:
                break
        return keys

    def _key(self, group_id: int) -> str:
        part, row = self._parts.locate(group_id)
        columns = part.task.columns(row) if self._episodes else {"prompt": part.task.prompt_text(row)}
        return row_digest(columns)

    async def attempts(self, prompts: list[Prompt]) -> list[TriedCompletion]:
        """Texts that any reward should score: a right answer, an empty completion, and some text."""
        return await self._in_rows(lambda: [one for prompt in prompts for one in self._attempts(prompt)])

    async def references(self, prompts: list[Prompt]) -> list[TriedCompletion]:
        """Completions whose worth is known by the rows' reference answers, if the run has room for them. A
        row with an answer that the reward cannot read has its text."""
        return await self._in_rows(
            lambda: [one for prompt in prompts for one in self._references(prompt) if one.full is not None]
        )

    def _attempts(self, prompt: Prompt) -> Iterator[TriedCompletion]:
        yield from self._references(prompt)
        for kind, text in {"an empty completion": "", "the prompt as a completion": prompt.text}.items():
            yield self._tried(prompt, kind, ReferenceCompletion(text))

    def _references(self, prompt: Prompt) -> Iterator[TriedCompletion]:
        part, row = self._parts.locate(prompt.group_id)
        columns, name = part.task.columns(row), part.task.answer
        answer = None if name is None else find_reference(columns, name)
        for one in told_references(part.config.reward, answer, columns):
            yield self._tried(prompt, REFERENCE, one)

    def _tried(self, prompt: Prompt, kind: str, completion: ReferenceCompletion) -> TriedCompletion:
        room = self._config.sampling.max_tokens
        characters = room * self._characters_per_token  # so that megabytes are not tokenized
        text = encodable(completion.text[:characters])
        tokens = encode(self._tokenizer, text)
        fits = len(tokens) <= room and len(text) == len(encodable(completion.text))
        seen = self._tokenizer.decode(tokens[:room], skip_special_tokens=True)
        return TriedCompletion(
            prompt.group_id,
            prompt.row_id,
            kind,
            tokens[:room],
            completion.full if fits else None,
            completion.member,
            seen,
        )
