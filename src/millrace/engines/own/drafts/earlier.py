"""Drafts from earlier completions: of the same prompt, and of all prompts that this replica has seen.

Source: SpecRL (arXiv:2509.23232) drafts from the completions of a row in earlier epochs. Here tokens count as
soon as this replica has them, so siblings that run ahead count as well. Completions that another replica
sampled come along with work (`Work.earlier`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch

from millrace.core.types import Work
from millrace.engines.own.drafts.followers import LONGEST, Followers
from millrace.engines.own.drafts.worth import PAYS
from millrace.rollout.continuation import Continuation

KNOWN_MAX = 1 << 12  # trajectories
PENDING_TOKENS_MAX = 1 << 16
"""Finished completions wait, unread, until drafts are made. So many tokens of them are kept."""


class EarlierCompletions:
    """A `Drafter` without a model."""

    wants_hidden = False

    def __init__(self, followers: Followers | None = None) -> None:
        self._followers = Followers() if followers is None else followers
        # By trajectory and length of its prompt (a fork has another), the hash of the prompt, how many tokens
        # were learned, and the lease, None at its end. The next turn begins with the same tokens.
        self._learned: OrderedDict[tuple[int, int], tuple[int, int, int | None]] = OrderedDict()
        self._pending: deque[tuple[int, list[int], int]] = deque()
        self._pending_tokens = 0
        self._hints = Hints()

    def propose(
        self, rows: Sequence[Continuation], most: Sequence[int], hidden: torch.Tensor | None
    ) -> list[list[int]]:
        while self._pending:
            self._followers.learn(*self._pending.popleft())
        self._pending_tokens = 0
        numbers = []
        for row in rows:
            number, tokens, start = self._unread(row)
            for hint in self._hints.take(number):
                self._followers.add(number, hint, len(row.work.prompt))
            self._followers.learn(number, tokens, start)
            numbers.append(number)
        return [self._draft(*each) for each in zip(numbers, rows, most, strict=True)]

    def note(self, row: Continuation, count: int, draft: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Nothing: `propose` reads the tokens, and judges by them."""

    def finish(self, row: Continuation) -> None:
        unread = self._unread(row, ended=True)
        self._pending.append(unread)
        self._pending_tokens += len(unread[1])
        while self._pending_tokens > PENDING_TOKENS_MAX:
            self._pending_tokens -= len(self._pending.popleft()[1])

    def swap(self) -> None:
        """Nothing: tokens of another version are drafts as well."""

    def _draft(self, number: int, row: Continuation, most: int) -> list[int]:
        """As many tokens as all together are likely enough. `number`: the hash of the prompt."""
        recent, likely = row.tokens[-LONGEST:], 1.0
        draft: list[int] = []
        while len(draft) < most:
            token, chance = self._followers.guess(number, recent)
            likely *= chance
            if likely < PAYS:
                break
            draft.append(token)
            recent = [*recent[1:], token]
        return draft

    def _unread(self, row: Continuation, *, ended: bool = False) -> tuple[int, list[int], int]:
        """The arguments of `Followers.learn` for what `row` has sampled since the last call."""
        work, begin = row.work, len(row.work.prompt)
        key = work.trajectory_id, begin
        if (known := self._learned.pop(key, None)) is None:
            known = hash(tuple(work.prompt)), begin, None
        number, start, lease = known
        if lease != work.lease:
            start = min(start, begin + len(work.tokens))  # it may have begun again
            self._hints.keep(number, work)
        self._learned[key] = number, len(row.tokens), None if ended else work.lease
        if len(self._learned) > KNOWN_MAX:
            self._learned.popitem(last=False)
        before = max(0, start - LONGEST)
        return number, row.tokens[before:], start - before


TOKENS_MAX = 1 << 20


class Hints:
    """They wait, unread, until their prompt gets its first draft: most prompts never get one. Of more than
    `TOKENS_MAX` tokens the oldest are forgotten."""

    def __init__(self) -> None:
        self._works: OrderedDict[int, Work] = OrderedDict()
        self.num_tokens = 0

    def keep(self, number: int, work: Work) -> None:
        """`number`: the hash of the prompt of `work`."""
        if not work.earlier:
            return
        self.take(number)
        self._works[number] = work
        self.num_tokens += _size(work)
        while self.num_tokens > TOKENS_MAX:
            self.take(next(iter(self._works)))

    def take(self, number: int) -> list[list[int]]:
        """Completions of a prompt, each behind the prompt. They are forgotten here."""
        work = self._works.pop(number, None)
        if work is None:
            return []
        self.num_tokens -= _size(work)
        return [[*work.prompt, *tokens] for tokens in work.earlier]


def _size(work: Work) -> int:
    """Tokens that it takes to keep `work`."""
    return sum(map(len, (work.prompt, work.tokens, *work.earlier)))
