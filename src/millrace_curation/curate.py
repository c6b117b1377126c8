"""`curate`: filters, then the gold check, then pass rates. Each sees the rows that those before it kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from millrace.config.schema import Config
from millrace.config.tables.task import RowsSection
from millrace.conversations.tokenizer import load_dated_tokenizer
from millrace.core.errors import ConfigError, DataError
from millrace.ledger import SqliteLedger
from millrace.run.content_digests import content_digests
from millrace_curation import filters
from millrace_curation.candidate import CandidateRow, Dropped, Reason, check_writable
from millrace_curation.filters import EvaluationText, contaminated
from millrace_curation.measure import AttemptsByRow, attempt_ledger, groups_by_row, sample_rates, try_golds
from millrace_curation.row_measures import GoldScore, PassRate, check_template, judge_difficulty, judge_gold
from millrace_curation.task_rows import read_candidates

OnStage = Callable[[str, int, int], None]
"""Called with the stage, how much of it has ended, and all of it."""


@dataclass(frozen=True, slots=True)
class CurationOptions:
    """What is dropped. `near` None: no near duplicates; `gold` None: the check is made if rows have answers;
    `samples` 0: no model is run. `max_tokens` None: as many as the run has room for."""

    against: Sequence[EvaluationText] = ()
    ngram: int = 8
    near: float | None = 0.8
    min_tokens: int = 1
    max_tokens: int | None = None
    gold: bool | None = None
    gold_template: str = "{answer}"
    samples: int = 0
    correct_at: float = 1.0
    keep_hard: bool = False
    keep_easy: bool = False


@dataclass(slots=True)
class Curation:
    """Every row, and by its index: why it is dropped, the scores of its gold check, its pass rate."""

    rows: list[CandidateRow]
    drops: dict[int, Dropped] = field(default_factory=dict)
    golds: dict[int, dict[str, GoldScore]] = field(default_factory=dict)
    rates: dict[int, PassRate] = field(default_factory=dict)

    @property
    def kept(self) -> list[CandidateRow]:
        return [row for row in self.rows if row.index not in self.drops]

    def reasons(self) -> dict[Reason, int]:
        counts = Counter(drop.reason for drop in self.drops.values())
        return {reason: counts[reason] for reason in Reason if counts[reason]}


def curate(
    config: Config, options: CurationOptions, attempts: Path, on_stage: OnStage = lambda *_: None
) -> Curation:
    """Curate the rows of `config.task`. `attempts` is the ledger of scores and samples: what it has is not
    computed again. Call from the main thread, with no event loop running.

    Raises:
        ConfigError, DataError: options or rows are not what they should be; no row is left.
        LedgerError: another process works on `attempts`, or it is of another curation.
    """
    from millrace.devices.device import torch_device

    if options.samples:
        torch_device(config.model.device)  # refused before anything is read
    most = _most_tokens(config, options)
    check_template(options.gold_template)
    tokenizer = load_dated_tokenizer(config.model.path, config.model.date)
    rows = read_candidates(config, tokenizer, lambda ended, total: on_stage("rows read", ended, total))
    with_gold = _with_gold(config, options)
    curation = Curation(rows)
    curation.drops = filtered(rows, options, most, on_stage)
    _refuse_none_left(curation)
    check_writable(curation.kept)  # before anything is paid for
    if not with_gold and not options.samples:
        return curation
    groups = groups_by_row(len(rows), config.seed)
    with attempt_ledger(attempts, _about(config, rows)) as ledger:
        if with_gold:
            _check_golds(config, options, curation, tokenizer, ledger, attempts, groups, on_stage)
        if options.samples:
            _measure_rates(config, options, curation, ledger, attempts, groups, on_stage)
    return curation


def filtered(
    rows: Sequence[CandidateRow], options: CurationOptions, most: int, on_stage: OnStage = lambda *_: None
) -> filters.Drops:
    """The rows that the filters drop. A filter sees what those before it left."""
    near, against = options.near, options.against
    steps: list[tuple[str, Callable[[filters.Candidates], filters.Drops]]] = [
        ("broken rows", filters.broken),
        ("empty rows", filters.empty),
        ("lengths", lambda left: filters.lengths(left, options.min_tokens, most)),
        ("duplicates", filters.duplicates),
    ]
    if near is not None:
        steps.append(("near duplicates", lambda left: filters.near_duplicates(left, near)))
    if against:
        steps.append(("contamination", lambda left: contaminated(left, against, options.ngram)))
    drops: filters.Drops = {}
    for done, (name, step) in enumerate(steps, 1):
        drops |= step([row for row in rows if row.index not in drops])
        on_stage(f"filters done, the last {name}", done, len(steps))
    return drops


def _check_golds(
    config: Config,
    options: CurationOptions,
    curation: Curation,
    tokenizer: Any,
    ledger: SqliteLedger,
    attempts: Path,
    groups: dict[int, int],
    on_stage: OnStage,
) -> None:
    kind = f"gold-{xxhash.xxh3_64_hexdigest(options.gold_template.encode())}"
    curation.golds = try_golds(
        config,
        curation.kept,
        AttemptsByRow(attempts, ledger, kind),
        tokenizer,
        groups=groups,
        template=options.gold_template,
        on_progress=lambda ended, total: on_stage("golds checked", ended, total),
    )
    for index, scores in curation.golds.items():
        if dropped := judge_gold(scores, options.correct_at):
            curation.drops[index] = dropped
    _refuse_none_left(curation)


def _measure_rates(
    config: Config,
    options: CurationOptions,
    curation: Curation,
    ledger: SqliteLedger,
    attempts: Path,
    groups: dict[int, int],
    on_stage: OnStage,
) -> None:
    curation.rates = sample_rates(
        config,
        curation.kept,
        AttemptsByRow(attempts, ledger, f"samples-{options.samples}"),
        groups=groups,
        samples=options.samples,
        correct_at=options.correct_at,
        on_progress=lambda ended, total: on_stage("completions sampled", ended, total),
    )
    for index, rate in curation.rates.items():
        dropped = judge_difficulty(rate, keep_hard=options.keep_hard, keep_easy=options.keep_easy)
        if dropped:
            curation.drops[index] = dropped
    _refuse_none_left(curation)


def _most_tokens(config: Config, options: CurationOptions) -> int:
    room = config.rollout.max_sequence_tokens - config.sampling.max_tokens
    if options.max_tokens is not None and options.max_tokens > room:
        raise ConfigError(
            f"`--max-tokens` ({options.max_tokens}) is more than a prompt of this run may have: {room} "
            "(`rollout.max_sequence_tokens` - `sampling.max_tokens`)"
        )
    return room if options.max_tokens is None else options.max_tokens


def _with_gold(config: Config, options: CurationOptions) -> bool:
    has_answers = isinstance(config.task, RowsSection) and config.task.answer is not None
    if options.gold and not has_answers:
        raise ConfigError('`--gold` needs reference answers, and `task.answer` is "none": name their column')
    return has_answers if options.gold is None else options.gold


def _refuse_none_left(curation: Curation) -> None:
    """Raises: DataError: every row is dropped; names each reason with an example."""
    if curation.kept:
        return
    lines = []
    for reason, count in curation.reasons().items():
        index, one = next((i, drop) for i, drop in curation.drops.items() if drop.reason is reason)
        lines.append(f"  {reason} {count:,}, the first {curation.rows[index].row_id}: {one.detail}")
    hint = ""
    if Reason.GOLD_REFUSED in curation.reasons():
        hint = (
            "\n  If the reward looks for a frame, give it: --gold-template '<answer>{answer}</answer>'."
            "\n  If its full score is not 1, give --correct-at."
            "\n  If answers are no completions, as tests of code are not: --no-gold"
        )
    raise DataError(f"no row is left of {len(curation.rows):,}:\n" + "\n".join(lines) + hint)


def _about(config: Config, rows: Sequence[CandidateRow]) -> dict[str, str]:
    """All that decides an attempt: of the same name and value, its attempts count on."""
    texts = xxhash.xxh3_128()
    for row in rows:
        texts.update(f"{row.row_id}\0{row.prompt}\0{row.answer}\0".encode(errors="replace"))
    model = xxhash.xxh3_128()
    for name, digest in content_digests(config.model_copy(update={"evaluations": ()})).items():
        if name.startswith("model.path"):
            model.update(f"{name} {digest} ".encode())
    without = {"timeout_s", "memory_mb", "workers", "workers_max"}
    return {
        "rows": texts.hexdigest(),
        "model": model.hexdigest(),
        "reward": str(config.reward.model_dump(mode="json", exclude=without)),
        "sampling": str(config.sampling.model_dump(mode="json")),
        "seed": str(config.seed),
    }
