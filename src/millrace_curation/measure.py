"""Attempts at rows: reference and wrong answers for the gold check, and samples of a model. Resumable.

They cost time, so a ledger keeps them with their tokens and rewards. A chunk of rows is one evaluation of the
ledger: written whole, durably, and once. So after kill -9 a chunk is there or not, and a row that is there is
not computed again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from millrace.config.schema import Config
from millrace.controller.evaluation.prompt_attempt import PromptAttempt
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError
from millrace.core.rounding import reaches
from millrace.core.types import EvaluationAttempt, EvaluationRecord, Finish, Prompt, Scored, ScoreRequest
from millrace.evaluation.evaluate import plain_sampling, serving_engine
from millrace.evaluation.generate import Completion, episode_player, generate
from millrace.evaluation.scoring import Scorer
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader
from millrace.tasks.order import row_of
from millrace_curation.candidate import CandidateRow
from millrace_curation.row_measures import KINDS, GoldScore, PassRate, attempts_at

GOLD_ROWS = 64
"""Rows whose gold check is recorded together."""
ROUNDS = 4
"""Completions that are sampled and recorded together, in engines full of them."""

T = TypeVar("T")
OnProgress = Callable[[int, int], None]


def groups_by_row(num_rows: int, seed: int) -> dict[int, int]:
    """The group of the first epoch in which a run with this seed draws each row. Rewards ask for groups."""
    return {row_of(group_id, num_rows, seed): group_id for group_id in range(num_rows)}


def try_golds(
    config: Config,
    rows: Sequence[CandidateRow],
    store: AttemptsByRow,
    tokenizer: Any,
    *,
    groups: Mapping[int, int],
    template: str,
    on_progress: OnProgress,
) -> dict[int, dict[str, GoldScore]]:
    """The scores of each row's attempts, by kind (`row_measures`). Rows in `store` are not tried again."""
    texts = dict(zip((row.index for row in rows), attempts_at(rows, template), strict=True))
    missing = [row for row in rows if row.index not in store.by_row]
    checked = len(rows) - len(missing)
    with Scorer(config) as scorer:
        for chunk in _chunks(missing, GOLD_ROWS):
            attempts = [
                (row, number, Completion(tokenizer.encode(text, add_special_tokens=False), Finish.STOP))
                for row in chunk
                for number, text in enumerate(texts[row.index])
                if text is not None
            ]
            store.keep(_scored(scorer, attempts, groups))
            checked += len(chunk)
            on_progress(checked, len(rows))

    def seen(one: EvaluationAttempt) -> str:
        return tokenizer.decode(
            list(one.tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    return {
        row.index: {
            KINDS[one.attempt]: GoldScore(one.reward, one.reason, seen(one))
            for one in store.by_row[row.index]
        }
        for row in rows
    }


def sample_rates(
    config: Config,
    rows: Sequence[CandidateRow],
    store: AttemptsByRow,
    *,
    groups: Mapping[int, int],
    samples: int,
    correct_at: float,
    on_progress: OnProgress,
) -> dict[int, PassRate]:
    """The pass rate of each row, from `samples` completions by `config.model`, sampled and scored as in
    training. Rows in `store` are not sampled again. Progress is in completions."""
    missing = [row for row in rows if row.index not in store.by_row]
    ended, total = itertools.count(samples * (len(rows) - len(missing)) + 1), samples * len(rows)
    if missing and config.reward.kind == "environment":
        wanted = {groups[row.index]: row for row in missing}
        asyncio.run(_play(config, wanted, store, samples, lambda: on_progress(next(ended), total)))
    elif missing:
        engine, sampling = serving_engine(config), plain_sampling(config)
        with Scorer(config) as scorer:
            for chunk in _chunks(missing, max(1, ROUNDS * config.rollout.slots // samples)):
                drawn = generate(
                    engine,
                    [row.tokens for row in chunk],
                    sampling,
                    n=samples,
                    seed=config.seed + chunk[0].index,  # else chunks would share their noise
                    on_end=lambda: on_progress(next(ended), total),
                )
                attempts = [
                    (row, number, one)
                    for row, completions in zip(chunk, drawn, strict=True)
                    for number, one in enumerate(completions, 1)
                ]
                store.keep(_scored(scorer, attempts, groups))
    return {row.index: pass_rate(store.by_row[row.index], correct_at) for row in rows}


async def _play(
    config: Config,
    rows: Mapping[int, CandidateRow],
    store: AttemptsByRow,
    samples: int,
    on_end: Callable[[], None],
) -> None:
    """Play `samples` episodes of each row, and record them. `rows` are by group."""
    engine, sampling = serving_engine(config), plain_sampling(config)
    size = max(1, ROUNDS * config.rollout.slots // samples)
    async with episode_player(config, engine, min(rows)) as player:
        for groups in _chunks(sorted(rows), size):
            records, attempts = list[EvaluationAttempt](), list[PromptAttempt]()
            for group_id in groups:
                row, prompt = rows[group_id], await player.prompt(group_id)
                for number in range(1, samples + 1):
                    if isinstance(prompt, Prompt):
                        index = group_id * samples + number
                        attempts.append(PromptAttempt(index, row.index, prompt, number, config.own_prompts))
                    else:
                        records.append(_without_prompt(row, number, prompt.reason))
                        on_end()
            await player.play(attempts, sampling, config.seed, on_end)
            store.keep([*records, *(one.record() for one in attempts)])


def _without_prompt(row: CandidateRow, number: int, reason: str) -> EvaluationAttempt:
    return EvaluationAttempt(row.index, row.row_id, number, token_array(), Finish.STOP, None, reason=reason)


def pass_rate(attempts: Sequence[EvaluationAttempt], correct_at: float) -> PassRate:
    rewards = [one.reward for one in attempts if one.reward is not None]
    return PassRate(
        correct=sum(reaches(reward, correct_at) for reward in rewards),
        scored=len(rewards),
        unscored=len(attempts) - len(rewards),
        truncated=sum(one.finish is Finish.LENGTH for one in attempts),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
    )


def _scored(
    scorer: Scorer, attempts: Sequence[tuple[CandidateRow, int, Completion]], groups: Mapping[int, int]
) -> list[EvaluationAttempt]:
    """The attempts, each with its row and number, with their rewards."""
    requests = [
        ScoreRequest(place, groups[row.index], token_array(one.tokens), one.finish)
        for place, (row, _, one) in enumerate(attempts)
    ]
    scored = []
    for (row, number, _), request, timed in zip(attempts, requests, scorer.scores(requests), strict=True):
        score = timed.score
        reward, reason = (score.value, "") if isinstance(score, Scored) else (None, score.reason)
        attempt = (row.index, row.row_id, number, request.tokens, request.finish, reward)
        scored.append(EvaluationAttempt(*attempt, reason=reason))
    return scored


def _chunks(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# ---------------------------------------------------------------- the ledger


class AttemptsByRow:
    """One kind of attempts ("gold", "samples") of a curation, by row. See `attempt_ledger`."""

    def __init__(self, path: Path, ledger: SqliteLedger, kind: str) -> None:
        self._ledger, self._kind = ledger, kind
        self.by_row: dict[int, list[EvaluationAttempt]] = defaultdict(list)
        names = [one.name for one in ledger.evaluations() if one.name.partition(" ")[0] == kind]
        if names:
            with LedgerReader(path) as reader:
                for name in names:
                    self._add(reader.attempts(name, 0))

    def keep(self, attempts: Sequence[EvaluationAttempt]) -> None:
        """Record every attempt at some rows, durably. `prompt_index` is the number of a row.

        Raises: LedgerError: a row is recorded already; the disk is full.
        """
        rows = sorted({one.prompt_index for one in attempts})
        assert not self.by_row.keys() & set(rows), rows
        self._ledger.evaluated(EvaluationRecord(f"{self._kind} {rows[0]}", 0), attempts)
        self._add(attempts)

    def _add(self, attempts: Sequence[EvaluationAttempt]) -> None:
        for one in attempts:
            self.by_row[one.prompt_index].append(one)


@contextmanager
def attempt_ledger(path: Path, about: Mapping[str, Any]) -> Iterator[SqliteLedger]:
    """The ledger of a curation, made if there is none. `about` is all that decides its attempts.

    Raises:
        DataError: the file is of a curation with another model, data set, reward or sampling.
        LedgerError: another process works on it; it is damaged.
    """
    ledger = SqliteLedger(path, run=dict(about))
    try:
        before = {key: value for key, value in ledger.run.items() if key in about}
        changed = [
            f"  {key}: {before.get(key)} -> {value}"
            for key, value in about.items()
            if before.get(key) != value
        ]
        if changed:
            raise DataError(
                f"{path} has attempts that were made otherwise:\n"
                + "\n".join(changed)
                + "\n  Put that back, or name another directory with --out"
            )
        yield ledger
    finally:
        ledger.close()
