"""Drafts from earlier completions: of the same prompt, and of all prompts that this replica has seen.

A bounded table has what followed the last tokens. A context is a row and its last n tokens, or the last n
tokens alone. The table knows for each context the token that followed most, and how often. Long contexts of
the row come first: the longest match of a suffix. A token that a context predicts is not learned by shorter
ones. This is the exclusion of prediction by partial matching (Moffat, 1990, "Implementing the PPM data
compression scheme").

Source: SpecRL (arXiv:2509.23232) drafts from the completions of a row in earlier epochs. Here tokens count as
soon as this replica has them, so siblings that run ahead count as well. Completions that another replica
sampled come along with work (`Work.earlier`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import torch

from millrace.core.types import Work
from millrace.engines.own.drafts.drafter import PAYS, Worth
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


# ---------------------------------------------------------------- what followed


ROW_ORDERS, ALL_ORDERS = (8, 4, 2), (4, 3, 2, 1)
LONGEST = max(*ROW_ORDERS, *ALL_ORDERS)
LEVELS = 5
SURE = 0.9

Entry = list[int]  # the token, how often it followed, how often another did


class Followers:
    """Holds about twice `contexts_max` contexts: a younger and an older half. A context that is asked for
    moves to the younger half. If that is full, the older half is forgotten.

    Each kind of context (its length, and how sure its entry is) has a `Worth`: how often it was right about
    tokens that came in later.
    """

    def __init__(self, contexts_max: int = 1 << 17) -> None:
        self._contexts_max = contexts_max
        self._young: dict[int, Entry] = {}
        self._old: dict[int, Entry] = {}
        self._worths = [Worth() for _ in range((len(ROW_ORDERS) + len(ALL_ORDERS)) * LEVELS)]

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, row: int, tokens: Sequence[int], start: int) -> None:
        """`tokens[start:]` followed what is before them, in completions of `row`."""
        for place in range(start, len(tokens)):
            token = tokens[place]
            for kind, context in self._contexts(row, tokens[max(0, place - LONGEST) : place]):
                entry = self._entry(context)
                if entry is None:
                    self._young[context] = [token, 1, 0]
                    continue
                worth = self._worths[kind + _level(entry)]
                if entry[0] == token:
                    worth.note(1, 1)
                    entry[1] += 1
                    break
                worth.note(0, 1)
                entry[2] += 1
                if entry[2] > entry[1]:
                    entry[:] = token, 1, 0
            self._age()

    def add(self, row: int, tokens: Sequence[int], start: int) -> None:
        """As `learn`, but only what is missing is added: `tokens` may have been learned before. So they are
        no evidence of how often a context is right."""
        for place in range(start, len(tokens)):
            for _, context in self._contexts(row, tokens[max(0, place - LONGEST) : place]):
                entry = self._entry(context)
                if entry is None:
                    self._young[context] = [tokens[place], 1, 0]
                elif entry[0] == tokens[place]:
                    break
            self._age()

    def _age(self) -> None:
        if len(self._young) > self._contexts_max:
            self._young, self._old = {}, self._young

    def guess(self, row: int, recent: Sequence[int]) -> tuple[int, float]:
        """The token that most likely follows `recent` in a completion of `row`, and its probability: 0 if
        nothing is known."""
        token, best = 0, 0.0
        for kind, context in self._contexts(row, recent):
            if (entry := self._entry(context)) is not None:
                share = self._worths[kind + _level(entry)].share
                if share > best:
                    token, best = entry[0], share
                if share >= SURE:
                    break
        return token, best

    def _entry(self, context: int) -> Entry | None:
        entry = self._young.get(context)
        if entry is None and (entry := self._old.pop(context, None)) is not None:
            self._young[context] = entry
        return entry

    @staticmethod
    def _contexts(row: int, recent: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The kind and the hash of each context, longest of the row first."""
        kind = 0
        for order in ROW_ORDERS:
            if order <= len(recent):
                yield kind, hash((row, *recent[-order:]))
            kind += LEVELS
        for order in ALL_ORDERS:
            if order <= len(recent):
                yield kind, hash((-1, *recent[-order:]))
            kind += LEVELS


def _level(entry: Entry) -> int:
    """How sure an entry is, in [0, LEVELS)."""
    _, right, wrong = entry
    if wrong:
        return 1 + (right >= 2 * wrong) + (right >= 9 * wrong)
    return 4 if right > 1 else 0
