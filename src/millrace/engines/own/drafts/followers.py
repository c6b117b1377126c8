"""A bounded table of what followed the last tokens, in one row's completions and in all.

A context is a row and its last n tokens, or the last n tokens alone. The table knows for each context the
token that followed most, and how often. Long contexts of the row come first: the longest match of a suffix. A
token that a context predicts is not learned by shorter ones. This is the exclusion of prediction by partial
matching (Moffat, 1990, "Implementing the PPM data compression scheme").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.engines.own.drafts.worth import Worth

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
