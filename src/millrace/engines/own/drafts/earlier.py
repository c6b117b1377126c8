"""Drafts from earlier completions: of the same prompt, and of all prompts that this replica has seen.

Source: SpecRL (arXiv:2509.23232) drafts from the completions of a row in earlier epochs. Here tokens count as
soon as this replica has them, so siblings that run ahead count as well. Completions that another replica
sampled come along with work (`Work.earlier`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch

from millrace.engines.own.drafts.followers import LONGEST, Followers
from millrace.engines.own.drafts.hints import Hints
from millrace.engines.own.drafts.worth import PAYS
from millrace.rollout.continuation import Continuation

ROWS_MAX, RUNNING_MAX = 1 << 14, 1 << 12
PENDING_TOKENS_MAX = 1 << 16
"""Finished completions wait, unread, until drafts are made. So many tokens of them are kept."""


class EarlierCompletions:
    """A `Drafter` without a model."""

    wants_hidden = False

    def __init__(self, followers: Followers | None = None) -> None:
        self._followers = Followers() if followers is None else followers
        self._rows: OrderedDict[tuple[int, ...], int] = OrderedDict()  # number of a prompt
        self._num_rows = 0
        self._learned: OrderedDict[int, int] = OrderedDict()  # by trajectory, how many of its tokens
        self._pending: deque[tuple[int, list[int], int]] = deque()
        self._pending_tokens = 0
        self._hints = Hints()

    def propose(
        self, rows: Sequence[Continuation], most: Sequence[int], hidden: torch.Tensor | None
    ) -> list[list[int]]:
        while self._pending:
            self._followers.learn(*self._pending.popleft())
        self._pending_tokens = 0
        for row in rows:
            unread = self._unread(row)
            for tokens in self._hints.take(unread[0]):
                self._followers.add(unread[0], tokens, len(row.work.prompt))
            self._followers.learn(*unread)
        return [self._draft(row, limit) for row, limit in zip(rows, most, strict=True)]

    def note(self, row: Continuation, count: int, draft: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Nothing: `propose` reads the tokens, and judges by them."""

    def finish(self, row: Continuation) -> None:
        unread = self._unread(row)
        self._learned.pop(row.work.trajectory_id)
        self._pending.append(unread)
        self._pending_tokens += len(unread[1])
        while self._pending_tokens > PENDING_TOKENS_MAX:
            self._pending_tokens -= len(self._pending.popleft()[1])

    def swap(self) -> None:
        """Nothing: tokens of another version are drafts as well."""

    def _draft(self, row: Continuation, most: int) -> list[int]:
        """As many tokens as all together are likely enough."""
        number, recent, likely = self._number(row), row.tokens[-LONGEST:], 1.0
        draft: list[int] = []
        while len(draft) < most:
            token, chance = self._followers.guess(number, recent)
            likely *= chance
            if likely < PAYS:
                break
            draft.append(token)
            recent = [*recent[1:], token]
        return draft

    def _unread(self, row: Continuation) -> tuple[int, list[int], int]:
        """The arguments of `Followers.learn` for what `row` has sampled since the last call."""
        first, trajectory_id = len(row.work.prompt), row.work.trajectory_id
        number = self._number(row)
        if trajectory_id not in self._learned:
            self._hints.keep(number, row.work)
        start = self._learned.get(trajectory_id, first)
        self._learned[trajectory_id] = len(row.tokens)
        if len(self._learned) > RUNNING_MAX:
            self._learned.popitem(last=False)
        before = max(0, start - LONGEST)
        return number, row.tokens[before:], start - before

    def _number(self, row: Continuation) -> int:
        """A prompt's number. A prompt that was long not seen gets a new one."""
        prompt = tuple(row.work.prompt)
        number = self._rows.setdefault(prompt, self._num_rows)
        if number == self._num_rows:
            self._num_rows += 1
        self._rows.move_to_end(prompt)
        if len(self._rows) > ROWS_MAX:
            self._rows.popitem(last=False)
        return number
