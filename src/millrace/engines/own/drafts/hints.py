"""Completions of other replicas and earlier sessions, which came along with work (`Work.earlier`)."""

from __future__ import annotations

from collections import OrderedDict

from millrace.core.types import Work

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
