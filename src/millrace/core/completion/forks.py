"""The sequences of a trajectory: what the model saw before each of its tokens.

A trajectory without forks is one sequence: its prompt and its columns. A fork begins another sequence, for
example after an environment has written a history anew, or for a second agent. Columns hold every token once,
in order of time. So a token that several sequences share is stored once, and trained once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Fork(NamedTuple):
    """A sequence that begins with token `start` of the columns.

    It follows token `after - 1`, and all that precedes this token in its own sequence. With `after` 0 it
    follows the first `kept` tokens of the prompt.
    """

    start: int
    after: int
    kept: int = 0


class Path(NamedTuple):
    """What precedes a token in its sequence. `kept`: tokens of the prompt; None: all. `parts`: (start, stop)
    of stretches of the columns, in order."""

    kept: int | None
    parts: list[tuple[int, int]]


def path(forks: Sequence[Fork], stop: int) -> Path:
    """The first `stop` tokens of the columns, as far as token `stop - 1` sees them."""
    parts = list[tuple[int, int]]()
    for fork in reversed(forks):
        if fork.start < stop:
            parts.append((fork.start, stop))
            stop = fork.after
            if not stop:
                return Path(fork.kept, parts[::-1])
    return Path(None, [*([(0, stop)] if stop else []), *parts[::-1]])


def continued(forks: Sequence[Fork], stop: int) -> list[tuple[int, int]]:
    """The sequences of the first `stop` tokens, as runs: (number from 0 on, how many tokens in a row).

    The first fork that follows the last token of a sequence goes on with that sequence, as an agent does that
    has asked another one. Every other fork begins a sequence of its own.
    """
    runs, at_end, num_begun = list[tuple[int, int]](), dict[int, int](), 0
    starts = [Fork(0, 0), *forks]
    for fork, end in zip(starts, [*(fork.start for fork in forks), stop], strict=True):
        number = at_end.pop(fork.after, num_begun)
        num_begun = max(num_begun, number + 1)
        at_end[end] = number
        runs.append((number, end - fork.start))
    return runs


def num_seen(forks: Sequence[Fork], stop: int, num_prompt: int) -> int:
    """How many tokens precede the token after the first `stop` tokens of the columns, with the prompt's."""
    if not forks:
        return num_prompt + stop
    kept, parts = path(forks, stop)
    return (num_prompt if kept is None else kept) + sum(end - start for start, end in parts)


def context(prompt: array[int], tokens: array[int], forks: Sequence[Fork], stop: int) -> array[int]:
    """Ids that token `stop - 1` of the columns sees, of the prompt and of their `tokens`, and its own."""
    kept, parts = path(forks, stop)
    return sum((tokens[start:stop] for start, stop in parts), prompt[:kept])


def num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
