"""Tokens of one completion as packed columns, from the engine that samples them to the trainer.

A token is four bytes of id, four bytes of log-prob, and a share of a run of versions. So a completion of
thousands of tokens is two buffers and a few pairs, to send, to store and to cut. If sampling cuts tokens off,
the token masks and their counts are two more buffers.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import nan
from typing import Any

from millrace.core.completion.forks import Fork
from millrace.core.completion.routing import Routing
from millrace.core.completion.token_masks import AllowedTokens
from millrace.core.completion.top_logprobs import Row, TopLogprobs

LOGPROB_MAX = 1e-4
"""Engines round: a log-prob up to this is taken as 0."""

OBSERVED = -1
"""In place of a version: the environment gave the token, and no model sampled it."""

Buffer = bytes | bytearray | memoryview | array

Extras = tuple[TopLogprobs | None, AllowedTokens | None, Routing | None, list[Fork]]
Packed = tuple[list[list[tuple[int, int]]], bytes, bytes, list[Extras]]
"""Several columns as few buffers: the runs of each, all token ids, all log-probs; the extras of each."""


def token_array(tokens: Iterable[int] = ()) -> array[int]:
    """Token ids as int32."""
    return array("i", tokens)


class TokenColumns:
    """The tokens of a completion with their log-probs and versions. Columns grow at the end only.

    A stretch of sampled tokens is a turn. Observed tokens, the environment's answer, stand between two turns,
    or begin the columns: then they are the end of a prompt of its own (`Fork` with `start` 0).

    tokens    int32, ids
    logprobs  float32, of the distribution that was sampled from; NaN: observed
    runs      (version or OBSERVED, how many tokens in a row), in order of position; neighbours differ
    top_logprobs    the most likely tokens at each position; None: not recorded
    token_masks   all tokens that could have come at each position; None: the complete vocabulary
    routing       the experts of each position; None: not recorded
    forks         where other sequences of the trajectory begin, in order. A part of columns has the forks in
                  it, with the positions of the whole

    Columns are equal if their bytes are: NaN equals itself, and -0.0 is not 0.0. Pickling with protocol 5
    hands out the buffers without a copy, so columns that are sent out of band must not grow any more.
    """

    __slots__ = ("forks", "logprobs", "routing", "runs", "token_masks", "tokens", "top_logprobs")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.runs: list[tuple[int, int]] = []
        self.top_logprobs: TopLogprobs | None = None
        self.token_masks: AllowedTokens | None = None
        self.routing: Routing | None = None
        self.forks: list[Fork] = []

    @classmethod
    def of(
        cls, tokens: Iterable[int], logprobs: Iterable[float], versions: int | Iterable[int]
    ) -> TokenColumns:
        """`versions`: one for each token, or one for all tokens. Log-probs are rounded to float32.

        Raises: ValueError: the columns differ in length.
        """
        columns = cls()
        columns.tokens, columns.logprobs = array("i", tokens), array("f", logprobs)
        if isinstance(versions, int):
            columns.runs = [(versions, len(columns))] if columns.tokens else []
        else:
            columns.runs = [(version, len(list(run))) for version, run in groupby(versions)]
        columns._refuse_misaligned()
        return columns

    @classmethod
    def from_buffers(
        cls,
        tokens: Buffer,
        logprobs: Buffer,
        runs: Iterable[Sequence[int]],
        top_logprobs: TopLogprobs | None = None,
        token_masks: tuple[Buffer, Buffer] | None = None,
        routing: Routing | None = None,
        forks: Iterable[Sequence[int]] = (),
    ) -> TokenColumns:
        """A copy of int32 ids and float32 log-probs. `token_masks`: their counts and ids. Raises: as `of`."""
        columns = cls()
        columns.tokens.frombytes(tokens)
        columns.logprobs.frombytes(logprobs)
        columns.runs = [(version, count) for version, count in runs]
        columns.top_logprobs, columns.routing = top_logprobs, routing
        columns.forks = [Fork(*fork) for fork in forks]
        if token_masks is not None:
            columns.token_masks = AllowedTokens()
            columns.token_masks.counts.frombytes(token_masks[0])
            columns.token_masks.tokens.frombytes(token_masks[1])
        columns._refuse_misaligned()
        return columns

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> TokenColumns:
        """A copy of the tokens from `part.start` to `part.stop`."""
        start, stop, step = part.indices(len(self.tokens))
        assert step == 1, part
        columns = TokenColumns()
        columns.tokens, columns.logprobs = self.tokens[start:stop], self.logprobs[start:stop]
        columns.runs = _cut(self.runs, start, stop)
        columns.top_logprobs = self.top_logprobs and self.top_logprobs.part(start, stop)
        columns.token_masks = self.token_masks and self.token_masks.part(start, stop)
        columns.routing = self.routing and self.routing.part(start, stop)
        columns.forks = [fork for fork in self.forks if start <= fork.start < stop]
        return columns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenColumns):
            return NotImplemented
        return (
            self.runs == other.runs
            and self.tokens == other.tokens
            and self.logprobs.tobytes() == other.logprobs.tobytes()
            and self.top_logprobs == other.top_logprobs
            and self.token_masks == other.token_masks
            and self.routing == other.routing
            and self.forks == other.forks
        )

    __hash__ = None  # type: ignore[assignment]  # they grow

    def __repr__(self) -> str:
        return f"TokenColumns({len(self)} tokens, versions {self.runs})"

    @property
    def sampled_runs(self) -> list[tuple[int, int]]:
        """The runs without observed tokens."""
        return [run for run in self.runs if run[0] != OBSERVED]

    @property
    def version_first(self) -> int | None:
        """The version of the first sampled token; None: there is none."""
        for version, _ in self.runs:
            if version != OBSERVED:
                return version
        return None

    @property
    def version_last(self) -> int | None:
        """The version of the last sampled token; None: there is none."""
        for version, _ in reversed(self.runs):
            if version != OBSERVED:
                return version
        return None

    @property
    def version_open(self) -> int | None:
        """The version that has begun the present turn; None: the turn has no token, so any version may."""
        return self.version_last if self.runs and self.runs[-1][0] != OBSERVED else None

    @property
    def sequence_start(self) -> int:
        """The number of tokens before those that the present sequence samples."""
        if not self.forks:
            return 0
        return next(stop for start, stop, _ in self.turns() if start == self.forks[-1].start)

    @property
    def prompt_end(self) -> int:
        """The number of tokens before the first turn: the end of a prompt of its own."""
        return self.runs[0][1] if self.runs and self.runs[0][0] == OBSERVED else 0

    @property
    def turn_start(self) -> int:
        """The number of tokens before the present turn."""
        start = len(self.tokens)
        for version, count in reversed(self.runs):
            if version == OBSERVED:
                break
            start -= count
        return start

    def versions(self) -> list[int]:
        """The version of every token; OBSERVED of observed tokens."""
        return [version for version, count in self.runs for _ in range(count)]

    def sampled(self) -> list[bool] | None:
        """Whether each token was sampled; None: every token was."""
        if len(self.sampled_runs) == len(self.runs):
            return None
        flags = list[bool]()
        for version, count in self.runs:
            flags += [version != OBSERVED] * count
        return flags

    def turns(self) -> list[tuple[int, int, bool]]:
        """(start, stop, sampled) of the stretches of sampled and of observed tokens, in order."""
        found, begin, stop, before = list[tuple[int, int, bool]](), 0, 0, None
        for version, count in self.runs:
            sampled = version != OBSERVED
            if sampled is before:
                found.pop()
            else:
                begin, before = stop, sampled
            stop += count
            found.append((begin, stop, sampled))
        return found

    def without_top_logprobs(self) -> TokenColumns:
        """The same tokens, not copied."""
        if self.top_logprobs is None:
            return self
        columns = TokenColumns()
        columns.tokens, columns.logprobs, columns.runs = self.tokens, self.logprobs, self.runs
        columns.token_masks, columns.routing, columns.forks = self.token_masks, self.routing, self.forks
        return columns

    # ------------------------------------------------------------ growing

    def append(
        self,
        token: int,
        logprob: float,
        version: int,
        top_logprobs: Row | None = None,
        token_masks: bytes | None = None,
        routing: Routing | None = None,
    ) -> None:
        """`top_logprobs`: for every token, always as many, or for no token. `token_masks`: int32 ids.
        `routing`: of one position."""
        if top_logprobs is not None:
            self.top_logprobs = self.top_logprobs or TopLogprobs(len(top_logprobs[0]))
            self.top_logprobs.append(top_logprobs)
        if token_masks is not None or self.token_masks is not None:
            self.token_masks = self.token_masks or AllowedTokens.unlimited(len(self))
            self.token_masks.append(token_masks or b"")
        self._extend_routing(routing, 1)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self._extend_runs(version, 1)

    def extend(self, other: TokenColumns) -> None:
        """Raises: ValueError: only one of the two columns has likely tokens, or their experts differ in
        number."""
        if self.top_logprobs is not None or other.top_logprobs is not None:
            self._extend_top_logprobs(other)
        if self.token_masks is not None or other.token_masks is not None:
            self.token_masks = self.token_masks or AllowedTokens.unlimited(len(self))
            self.token_masks.extend(other.token_masks or AllowedTokens.unlimited(len(other)))
        if self.routing is not None or other.routing is not None:
            self._extend_routing(other.routing, len(other))
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        for version, count in other.runs:
            self._extend_runs(version, count)
        if other.forks:
            self.forks += other.forks

    def fork(self, after: int, kept: int) -> None:
        """Begin another sequence (`Fork`) with the observation that follows."""
        self.forks.append(Fork(len(self), after, kept))

    def observe(self, tokens: Sequence[int]) -> None:
        """Append observed tokens."""
        assert self.runs or self.forks, "an observation before the first turn"
        if not tokens:
            return
        observed, num = TokenColumns(), len(tokens)
        observed.tokens, observed.logprobs = array("i", tokens), array("f", (nan,)) * num
        observed.runs = [(OBSERVED, num)]
        if (mine := self.top_logprobs) is not None:
            observed.top_logprobs = TopLogprobs.none(mine.num, num)
        self.extend(observed)

    def _extend_top_logprobs(self, other: TokenColumns) -> None:
        if self.top_logprobs is None and other.top_logprobs is not None and not self.tokens:
            self.top_logprobs = TopLogprobs(other.top_logprobs.num)
        mine, new = self.top_logprobs, other.top_logprobs
        if mine is not None and new is not None and mine.num == new.num:
            mine.extend(new)
        elif other.tokens:
            raise ValueError(f"columns do not align: {mine} likely tokens, and then {new}")

    def _extend_routing(self, routing: Routing | None, num_tokens: int) -> None:
        """Before the tokens are appended."""
        if (like := self.routing or routing) is not None:
            self.routing = self.routing or like.not_recorded(len(self))
            self.routing.extend(routing or like.not_recorded(num_tokens))

    def _extend_runs(self, version: int, count: int) -> None:
        runs = self.runs
        if runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + count
        else:
            runs.append((version, count))

    def _refuse_misaligned(self) -> None:
        num_tokens, num_versions = len(self.tokens), sum([count for _, count in self.runs])
        if not num_tokens == len(self.logprobs) == num_versions:
            raise ValueError(
                f"columns do not align: {num_tokens} tokens, {len(self.logprobs)} log-probs, "
                f"{num_versions} versions"
            )
        if self.top_logprobs is not None and not self.top_logprobs.aligned(num_tokens):
            raise ValueError(
                f"columns do not align: {num_tokens} tokens, {len(self.top_logprobs.tokens)} likely ones"
            )
        if self.token_masks is not None and not self.token_masks.aligned(num_tokens):
            raise ValueError(
                f"columns do not align: {num_tokens} tokens, {len(self.token_masks.tokens)} choices at "
                f"{len(self.token_masks.counts)} positions"
            )

        if self.routing is not None and not self.routing.aligned(num_tokens):
            raise ValueError(
                f"columns do not align: {num_tokens} tokens, {len(self.routing.experts)} experts, "
                f"{self.routing.width} a position"
            )

    # ------------------------------------------------------------ sending

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        buffer = pickle.PickleBuffer if protocol >= 5 else array.tobytes
        plain, token_masks = (buffer(self.tokens), buffer(self.logprobs)), self.token_masks
        masks = token_masks and (buffer(token_masks.counts), buffer(token_masks.tokens))
        extras = self.top_logprobs, masks, self.routing, self.forks
        return TokenColumns.from_buffers, (*plain, self.runs, *extras)


def pack(columns: Sequence[TokenColumns]) -> Packed:
    tokens = b"".join([one.tokens for one in columns])
    logprobs = b"".join([one.logprobs for one in columns])
    return (
        [one.runs for one in columns],
        tokens,
        logprobs,
        [(one.top_logprobs, one.token_masks, one.routing, one.forks) for one in columns],
    )


def unpack(packed: Packed) -> list[TokenColumns]:
    """The inverse of `pack`. Raises: ValueError: the buffers do not fit together."""
    all_runs, token_bytes, logprob_bytes, all_extras = packed
    tokens, logprobs = array("i"), array("f")
    tokens.frombytes(token_bytes)
    logprobs.frombytes(logprob_bytes)
    unpacked, start = [], 0
    for runs, extras in zip(all_runs, all_extras, strict=True):
        end = start + (runs[0][1] if len(runs) == 1 else sum([count for _, count in runs]))
        columns = TokenColumns.__new__(TokenColumns)
        columns.tokens, columns.logprobs = tokens[start:end], logprobs[start:end]
        columns.runs = runs
        columns.top_logprobs, columns.token_masks, columns.routing, columns.forks = extras
        unpacked.append(columns)
        start = end
    if not start == len(tokens) == len(logprobs):
        raise ValueError(f"runs for {start} tokens, {len(tokens)} token ids, {len(logprobs)} log-probs")
    return unpacked


def _cut(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The runs of positions [start, stop). Seen from the end: most parts are the newest tokens."""
    cut, last = list[tuple[int, int]](), sum([count for _, count in runs])
    for version, count in reversed(runs):
        if last <= start:
            break
        first = last - count
        overlap = (last if last < stop else stop) - (first if first > start else start)
        if overlap > 0:
            cut.append((version, overlap))
        last = first
    cut.reverse()
    return cut
