"""Trajectories to read, token by token. A query reads only the trajectories that it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from millrace.core.types import Trajectory
from millrace.ledger.reading.reader import LedgerReader
from millrace.ledger.reading.samples import Choice, Sample
from millrace.run_directory.run_directory import RunDirectory

TOKENS_MAX = 2000
"""The most tokens shown of one completion. The others are counted."""
LOOK_S, QUERY_S = 0.5, 8.0
_PAGE = 200
_BROKEN = "\ufffd"  # stands for a character, some of whose bytes are in a token that is missing
_JOINED_MAX = 8


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token, or of the few tokens that make one character. `logprob` is their least."""

    text: str
    logprob: float
    version: int


@dataclass(frozen=True, slots=True)
class Shown:
    """One trajectory. `trained` is the version that trained on it; None: no version did."""

    trajectory_id: int
    group_id: int
    row_id: str
    state: str
    reason: str
    finish: str
    reward: float | None
    metrics: dict[str, float]
    num_tokens: int
    trained: int | None
    replica: str
    prompt: str
    token_texts: tuple[TokenText, ...]
    tokens_left_out: int


@dataclass(frozen=True, slots=True)
class TokenPage:
    """The result of a search: it read `looked_at` trajectories, down to `before`; None: all."""

    shown: list[Shown]
    looked_at: int
    before: int | None


def choose(
    run: RunDirectory, tokenizer: Any, choice: Choice, num: int, tokens_max: int = TOKENS_MAX
) -> list[Shown]:
    """The chosen trajectories. Raises LedgerError: the ledger is damaged, or the query takes `QUERY_S`."""
    if not run.ledger.exists():
        return []
    with _reader(run) as reader:
        return [shown_of(sample, tokenizer, tokens_max) for sample in reader.samples(choice, num)]


def search(run: RunDirectory, tokenizer: Any, text: str, num: int, before: int | None = None) -> TokenPage:
    """Trajectories with `text` in prompt or completion, the newest first.

    The search ends with `num` trajectories, or after `LOOK_S`. `TokenPage.before` continues the search."""
    shown: list[Shown] = []
    looked, wanted, until_s = 0, text.casefold(), time.monotonic() + LOOK_S
    if not run.ledger.exists():
        return TokenPage(shown, looked, None)
    with _reader(run) as reader:
        while len(shown) < num and time.monotonic() < until_s:
            page = reader.samples_before(before, _PAGE)
            if not page:
                return TokenPage(shown, looked, None)
            for sample in page:
                looked, before = looked + 1, sample.trajectory.trajectory_id
                if any(wanted in passage.casefold() for passage in _texts(sample, tokenizer)):
                    shown.append(shown_of(sample, tokenizer))
                if len(shown) == num:
                    break
    return TokenPage(shown, looked, before)


def shown_of(sample: Sample, tokenizer: Any, tokens_max: int = TOKENS_MAX) -> Shown:
    prompt, one = sample
    return Shown(
        trajectory_id=one.trajectory_id,
        group_id=one.group_id,
        row_id=prompt.row_id,
        state=one.state.value,
        reason=one.reason,
        finish=one.finish.value if one.finish else "",
        reward=one.reward,
        metrics=one.metrics,
        num_tokens=len(one.columns),
        trained=one.trained_version,
        replica=one.replica,
        prompt=prompt.text,
        token_texts=tuple(_token_texts(one, tokenizer, tokens_max)),
        tokens_left_out=max(0, len(one.columns) - tokens_max),
    )


def _reader(run: RunDirectory) -> LedgerReader:
    until_s = time.monotonic() + QUERY_S
    return LedgerReader(run.ledger, check=False, stop=lambda: time.monotonic() > until_s)


def _texts(sample: Sample, tokenizer: Any) -> Iterator[str]:
    yield sample.prompt.text
    if tokenizer is not None:
        yield tokenizer.decode(sample.trajectory.columns.tokens.tolist())


def _token_texts(one: Trajectory, tokenizer: Any, tokens_max: int) -> Iterator[TokenText]:
    columns = one.columns[:tokens_max]
    versions = chain.from_iterable(repeat(version, count) for version, count in columns.runs)
    joined: list[int] = []
    least = 0.0
    for token, logprob, version in zip(columns.tokens, columns.logprobs, versions, strict=True):
        joined.append(token)
        least = min(least, logprob)
        text = tokenizer.decode(joined) if tokenizer is not None else f"[{token}]"
        if text.endswith(_BROKEN) and len(joined) < _JOINED_MAX:
            continue
        yield TokenText(text, least, version)
        joined, least = [], 0.0
    if joined:
        yield TokenText(tokenizer.decode(joined), least, version)
