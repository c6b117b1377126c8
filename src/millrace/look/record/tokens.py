"""Trajectories to read, token by token. A query reads only the trajectories that it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Prompt
from millrace.ledger.reading.reader import LedgerReader
from millrace.ledger.reading.samples import Choice, Sample
from millrace.observe.conversation import Turn, ended_by, recorded, turns_of
from millrace.run_directory.run_directory import RunDirectory

TOKENS_MAX = 2000
"""The most tokens shown of one completion. The others are counted."""
LOOK_S, QUERY_S = 0.5, 8.0
_PAGE = 200
_BROKEN = "\ufffd"  # stands for a character, some of whose bytes are in a token that is missing
_JOINED_MAX = 8


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token, or of the few tokens that make one character. `logprob` is their least. It and
    `version` are None: the token is observed."""

    text: str
    logprob: float | None
    version: int | None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of an episode, with its tokens as far as they are shown."""

    turn: Turn
    token_texts: tuple[TokenText, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """One trajectory. `trained` is the version that trained on it; None: no version did. An episode has
    `turns`, and in `ended_by` the budget that ended it."""

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
    turns: tuple[ShownTurn, ...] = ()
    ended_by: str = ""


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


def choose_one(run: RunDirectory, tokenizer: Any, trajectory_id: int) -> list[Shown]:
    """The trajectory with this id, complete or not; empty: there is none. Raises LedgerError: as `choose`."""
    if not run.ledger.exists():
        return []
    with _reader(run) as reader:
        if (one := reader.find(trajectory_id)) is None:
            return []
        group = reader.group(one.group_id)
        prompt = Prompt(group.group_id, group.row_id, group.prompt, group.text)
        return [shown_of(Sample(prompt, one), tokenizer)]


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
    columns = one.columns[:tokens_max]
    parts = [_token_texts(columns[start:stop], tokenizer) for start, stop, _ in columns.turns()]
    turns = turns_of(one.columns, one.metrics)[: len(parts)]
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
        token_texts=tuple(piece for part in parts for piece in part),
        tokens_left_out=max(0, len(one.columns) - tokens_max),
        turns=tuple(ShownTurn(*shown) for shown in zip(turns, parts, strict=bool(turns))),
        ended_by=ended_by(one.metrics),
    )


def _reader(run: RunDirectory) -> LedgerReader:
    until_s = time.monotonic() + QUERY_S
    return LedgerReader(run.ledger, check=False, stop=lambda: time.monotonic() > until_s)


def _texts(sample: Sample, tokenizer: Any) -> Iterator[str]:
    yield sample.prompt.text
    if tokenizer is not None:
        yield tokenizer.decode(sample.trajectory.columns.tokens.tolist())


def _token_texts(columns: TokenColumns, tokenizer: Any) -> tuple[TokenText, ...]:
    """Of tokens that one turn has, so that no character is of two turns."""
    texts, joined, least = list[TokenText](), list[int](), 0.0
    logprobs, versions = recorded(columns)
    tokens = list(zip(columns.tokens, logprobs, versions, strict=True))
    for index, (token, logprob, version) in enumerate(tokens):
        joined.append(token)
        least = min(least, logprob or 0.0)
        text = tokenizer.decode(joined) if tokenizer is not None else f"[{token}]"
        if text.endswith(_BROKEN) and len(joined) < _JOINED_MAX and index < len(tokens) - 1:
            continue
        texts.append(TokenText(text, None if version is None else least, version, tuple(joined)))
        joined, least = [], 0.0
    return tuple(texts)
