"""Trajectories to read, token by token, with their advantages. A query reads only what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.algorithms.build import build
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from millrace.controller.state.groups import make_batch
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import MillraceError
from millrace.core.types import Group, Trajectory
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import ANY, Choice, Sample, SampleFilter
from millrace.observe.conversation_times import Turn, ended_by, recorded, turns_of
from millrace.run_directory.run_directory import RunDirectory
from millrace.trainer.batch.flat_batch import flatten


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`by_token`: of each trained trajectory, by its id, the advantage of each token. `masked`: ids of
    trajectories that were in the batch, and whose tokens the algorithm left out of the loss. `unknown`: why
    there is none, in words."""

    by_token: dict[int, list[float]] = field(default_factory=dict)
    masked: frozenset[int] = frozenset()
    unknown: str = ""

    def of(self, one: Trajectory) -> list[float]:
        """Its advantage, or one of each turn if they differ. Empty: it has none."""
        values = self.by_token.get(one.trajectory_id)
        if values is None:
            return []
        turns = [values[start] for start, _, sampled in one.columns.turns() if sampled]
        return turns[:1] if len(set(turns)) == 1 else turns

    @property
    def largest(self) -> float:
        """The size of the largest advantage of the group."""
        sizes = (abs(value) for values in self.by_token.values() for value in values)
        return max(sizes, default=0.0)


NO_ADVANTAGES = GroupAdvantages()


def advantages_of(group: Group, config: Config) -> GroupAdvantages:
    """Those that the trainer gave the group's tokens: the same code, with the same rewards and tokens. The
    algorithm of a run never changes, so they are exact; in other cases there are none."""
    version = max((m.trained_version for m in group.members if m.trained_version is not None), default=None)
    if version is None:
        return GroupAdvantages(unknown="No version trained on this group, so it has no advantages.")
    if why := _not_from_rewards(config):
        return GroupAdvantages(unknown=why)
    members = [member for member in group.members if member.trained_version == version]
    batch = make_batch(version - 1, [replace(group, members=members)])
    try:
        flat = flatten(batch, build(config.algorithm), max_tokens=config.completion_tokens_max, minibatches=1)
    except MillraceError as error:
        return GroupAdvantages(unknown=f"The advantages cannot be computed: {error}")
    (trained,) = batch.groups
    ids = [sequence.trajectory_id for sequence in trained.sequences]
    by_token = np.split(flat.advantages_C, np.cumsum([len(one.columns) for one in trained.sequences])[:-1])
    masked = frozenset(one for one, num in zip(ids, flat.trained_S, strict=True) if num == 0)
    pairs = zip(ids, by_token, strict=True)
    return GroupAdvantages({one: values.tolist() for one, values in pairs if one not in masked}, masked)


def _not_from_rewards(config: Config) -> str:
    """Why the group's rewards do not tell its advantages, in words; empty: they do."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return "The advantages are not recorded: the run's algorithm is a function, which only a run calls."
    needs = {
        "the values of a critic": algorithm.baseline == "value",
        "a teacher's log-probs": algorithm.teacher is not None,
        "the KL penalty of each reward": algorithm.kl > 0 and algorithm.kl_in == "reward",
        "all other groups of the batch": algorithm.scale == "batch",
    }
    missing = [what for what, needed in needs.items() if needed]
    if not missing:
        return ""
    return f"The advantages are not recorded. To compute them again needs {' and '.join(missing)}."


TOKENS_MAX = 2000
"""The most tokens shown of one completion. The others are counted."""
LOOK_S, QUERY_S = 0.5, 8.0
_PAGE = 200
_BROKEN = "\ufffd"  # stands for a character, some of whose bytes are in a token that is missing
_JOINED_MAX = 8


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token, or of the few tokens that make one character. `logprob` is their least. It and
    `version` are None: the token is observed. `advantage` None: it has none, or it is not known."""

    text: str
    logprob: float | None
    version: int | None
    ids: tuple[int, ...] = ()
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of an episode, with its tokens as far as they are shown."""

    turn: Turn
    token_texts: tuple[TokenText, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """One trajectory. `trained` is the version that trained on it; None: no version did. `versions` sampled
    its tokens. `advantages`: one, or one of each turn; empty: it has none, or they are not known. An episode
    has `turns`, and in `ended_by` the budget that ended it."""

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
    versions: tuple[int, ...] = ()
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A search read `looked_at` trajectories, down to `before`; None: all."""

    samples: list[Sample]
    looked_at: int
    before: int | None

    def summary(self, only: SampleFilter) -> str:
        """In words. `only`: the filter of the search."""
        those = "trajectories" if only == ANY else "trajectories that the filter lets through"
        end = "" if self.before is not None else " These were all."
        return f"Looked at {self.looked_at:,} {those}, the newest first.{end}"


def choose(
    run: RunDirectory,
    tokenizer: Any,
    choice: Choice,
    num: int,
    tokens_max: int = TOKENS_MAX,
    only: SampleFilter = ANY,
) -> list[Shown]:
    """The chosen trajectories. Raises LedgerError: the ledger is damaged, or the query takes `QUERY_S`."""
    if not run.ledger.exists():
        return []
    with reader_of(run) as reader:
        return [shown_of(sample, tokenizer, tokens_max) for sample in reader.samples(choice, num, only)]


def filtered_line(num: int, shown: int) -> str:
    """How many trajectories a filter lets through, and how many of them are shown."""
    counted = f"{num:,} {'trajectory' if num == 1 else 'trajectories'}"
    return f"{counted}. The first {shown} are shown." if shown < num else f"{counted}."


def count(run: RunDirectory, choice: Choice, only: SampleFilter) -> int:
    """The number of trajectories that `choose` chooses from."""
    if not run.ledger.exists():
        return 0
    with reader_of(run) as reader:
        return reader.num_samples(choice, only)


def search(
    run: RunDirectory,
    tokenizer: Any,
    text: str,
    num: int,
    before: int | None = None,
    only: SampleFilter = ANY,
) -> SearchResult:
    """As `look_for`, for a page."""
    if not run.ledger.exists():
        return SearchResult([], 0, None)
    with reader_of(run) as reader:
        return look_for(reader, tokenizer, text, num, before, only)


def look_for(
    reader: LedgerReader,
    tokenizer: Any,
    text: str,
    num: int,
    before: int | None = None,
    only: SampleFilter = ANY,
    look_s: float = LOOK_S,
) -> SearchResult:
    """The newest `num` trajectories with `text` in prompt or completion, of those that `only` lets through.

    The search ends with `num` trajectories, or after `look_s`. The `before` of its result continues it."""
    samples, looked = list[Sample](), 0
    wanted, until_s = text.casefold(), time.monotonic() + look_s
    while len(samples) < num and time.monotonic() < until_s:
        page = reader.samples_before(before, _PAGE, only)
        if not page:
            return SearchResult(samples, looked, None)
        for sample in page:
            looked, before = looked + 1, sample.trajectory.trajectory_id
            if any(wanted in passage.casefold() for passage in _texts(sample, tokenizer)):
                samples.append(sample)
            if len(samples) == num:
                break
    return SearchResult(samples, looked, before)


def shown_of(
    sample: Sample, tokenizer: Any, tokens_max: int = TOKENS_MAX, advantages: GroupAdvantages = NO_ADVANTAGES
) -> Shown:
    prompt, one = sample
    columns, by_token = one.columns[:tokens_max], advantages.by_token.get(one.trajectory_id)
    parts = [
        _token_texts(columns[start:stop], tokenizer, by_token[start:stop] if by_token else ())
        for start, stop, _ in columns.turns()
    ]
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
        versions=tuple(sorted({version for version, _ in one.columns.sampled_runs})),
        advantages=tuple(advantages.of(one)),
    )


def reader_of(run: RunDirectory) -> LedgerReader:
    """A reader whose queries end after `QUERY_S`."""
    until_s = time.monotonic() + QUERY_S
    return LedgerReader(run.ledger, check=False, stop=lambda: time.monotonic() > until_s)


def _texts(sample: Sample, tokenizer: Any) -> Iterator[str]:
    yield sample.prompt.text
    if tokenizer is not None:
        yield tokenizer.decode(sample.trajectory.columns.tokens.tolist())


def _token_texts(columns: TokenColumns, tokenizer: Any, advantages: Sequence[float]) -> tuple[TokenText, ...]:
    """Of tokens that one turn has, so that no character is of two turns. `advantages` empty: none."""
    texts, joined, least = list[TokenText](), list[int](), 0.0
    logprobs, versions = recorded(columns)
    tokens = list(zip(columns.tokens, logprobs, versions, strict=True))
    for index, (token, logprob, version) in enumerate(tokens):
        joined.append(token)
        least = min(least, logprob or 0.0)
        text = tokenizer.decode(joined) if tokenizer is not None else f"[{token}]"
        if text.endswith(_BROKEN) and len(joined) < _JOINED_MAX and index < len(tokens) - 1:
            continue
        advantage = advantages[index] if advantages and version is not None else None
        least_or_none = None if version is None else least
        texts.append(TokenText(text, least_or_none, version, tuple(joined), advantage))
        joined, least = [], 0.0
    return tuple(texts)
