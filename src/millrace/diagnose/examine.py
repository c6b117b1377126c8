"""The findings of the doctor in a run directory, to print, to show in a notebook or to read field by field,
and what was paid for, as text: samples of a run's ledger, and the first canary that earns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from millrace.config.inert import inert
from millrace.config.schema import Config
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.tables.generation import SamplingConfig
from millrace.conversations.tokenizer import Decode, open_decoder
from millrace.core.completion.marked import unmarked
from millrace.core.errors import DataError
from millrace.core.events import Event, Events
from millrace.core.rounding import ABSOLUTE, reaches
from millrace.core.types import EvaluationAttempt, State
from millrace.core.wings import wing
from millrace.diagnose.bottleneck import Bottleneck, bottleneck
from millrace.diagnose.evidence import Evidence, RewardRange, ScoredText
from millrace.diagnose.finding import Finding
from millrace.diagnose.rules import RULES, diagnose, gone
from millrace.diagnose.time_use import TimeUse, TimeUseLog
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Sample
from millrace.observe.conversation_times import sampled_tokens
from millrace.observe.shown_samples import clipped
from millrace.observe.sinks.jsonl import replay_events
from millrace.observe.sinks.log_files import parts
from millrace.observe.terminal import as_text
from millrace.rollout.engine_kinds import CUTS, knows_token_masks
from millrace.run_directory.run_directory import RunDirectory


def examine(run: RunDirectory) -> dict[str, Any]:
    """JSON types. Raises: DataError, ConfigError, LedgerError: a record is missing or damaged."""
    config = run.read_config()
    if not parts(run.events):
        raise DataError(f"{run.path} has no events.jsonl: the doctor reads the events that a run wrote")
    evidence = evidence_of(config)
    log = time_use_log(config)
    replay_events(run.events, (evidence, log), partial(diagnose, evidence))
    with LedgerReader(run.ledger) as reader:
        count_rewards(evidence, reader)
        if (decode := open_decoder(config.model.path)) is not None:
            read_texts(evidence, reader, decode)
        committed = reader.overview().version
    return {
        "run": str(run.path),
        "steps": len(evidence.by_version),
        "committed": committed,
        "schedule": config.schedule.kind,
        "dtype": evidence.dtype,
        "end": evidence.end or "it goes on, or was killed",
        "inert": inert(config),
        "healthy": not (findings := diagnose(evidence)),
        "findings": [asdict(finding) for finding in findings],
        "withdrawn": gone(evidence, findings),
        "bottleneck": asdict(bottleneck_of(config, log.use())),
    }


def time_use_log(config: Config) -> TimeUseLog:
    """The log of a run of `config` before its first event."""
    return TimeUseLog(config.reward.most_workers)


def bottleneck_of(config: Config, use: TimeUse) -> Bottleneck:
    rollout = config.rollout
    episodes = config.reward.kind == "environment"
    return bottleneck(use, slots=rollout.slots, colocated=rollout.colocated, episodes=episodes)


# Settings of `sampling` that the trainer's log-probs do not take into account.
_SHAPING = {
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "banned_token_ids",
}  # fmt: skip


def evidence_of(config: Config) -> Evidence:
    """The evidence of a run of `config` before its first event."""
    a = config.policy_gradient
    shaping = _SHAPING - CUTS if knows_token_masks(config) else _SHAPING
    return Evidence(
        config.rollout.quantization or config.trainer.quantization or config.model.dtype,
        schedule=config.schedule.kind,
        algorithm=config.algorithm.kind,
        corrects=a is not None and (a.correction is not None or a.anchor == "behavior"),
        compares=a is None or (a.teacher is None and a.baseline in ("group", "others")),
        canaries={one.name: one.canary for one in config.evaluations if one.canary is not None},
        plain=config.sampling.model_dump(include=shaping) == SamplingConfig().model_dump(include=shaping),
    )


def count_rewards(evidence: Evidence, reader: LedgerReader) -> None:
    """Count in the ledger, because a long log no longer has an event for each reward. The counts that need no
    look at each trajectory come first: a page that has no time for the rest has them."""
    states = reader.states()
    scored = sum(states[state] for state in (State.SCORED, State.BUFFERED, State.TRAINED))
    evidence.outcomes = Counter({"failed": states[State.FAILED], "scored": scored})
    if states[State.FAILED]:
        reasons = reader.reasons()
        evidence.failures = Counter({r: num for (state, r), num in reasons.items() if state == State.FAILED})
    low, high, num = reader.reward_range()
    if low is not None and high is not None:
        evidence.rewards = RewardRange(low, high, num)


# ---------------------------------------------------------------- what was paid for


EARLY, LATE = (0.0, 0.2), (0.8, 1.0)  # parts of the run
NUM = 128
SHOWN_CHARACTERS = 300


def read_texts(evidence: Evidence, reader: LedgerReader, decode: Decode) -> None:
    """At most `NUM` completions of each sort, each of another row. Raises: LedgerError."""
    evidence.early_texts = _texts(reader.samples_of_groups(EARLY, NUM, paid=True), decode)
    evidence.late_texts = _texts(reader.samples_of_groups(LATE, NUM, paid=True), decode)
    evidence.unpaid_texts = _texts(reader.samples_of_groups(LATE, NUM, paid=False), decode)
    evidence.canary_texts = [
        text
        for name, series in evidence.canary_rewards.items()
        if (versions := [version for version, reward in series.items() if reward.earned])
        for text in earning(reader, name, max(versions), decode)
    ]


def earning(reader: LedgerReader, name: str, version: int, decode: Decode | None) -> list[ScoredText]:
    """What the model wrote of completions of an evaluation with a reward above 0, the highest first."""
    attempts = [(one.reward, one) for one in reader.attempts(name, version) if one.reward is not None]
    paid = sorted((each for each in attempts if each[0] > ABSOLUTE), key=lambda each: -each[0])
    return [
        ScoredText(one.row_id, reward, "", decode(_own(one)) if decode else "(no tokenizer.json)")
        for reward, one in paid
    ]


def _own(attempt: EvaluationAttempt) -> list[int]:
    return sampled_tokens(unmarked(attempt.tokens, 0))


def _texts(samples: list[Sample], decode: Decode) -> list[ScoredText]:
    texts = {}
    for prompt, trajectory in samples:
        completion = decode(sampled_tokens(trajectory.columns))  # not what an environment wrote
        reward = trajectory.reward or 0.0  # the query asks for rewards
        text = ScoredText(prompt.row_id, reward, prompt.text, completion, trajectory.metrics)
        texts[prompt.row_id] = text
    return list(texts.values())


class CanaryWatch:
    """A sink. It warns once for each canary of `sections` with a completion that earns what none may: more
    than 0, or with a wrong gold answer at least `correct_at`. It reads the ledger's completions then.

    A failure in here ends the watch with a warning, and not the run.
    """

    def __init__(
        self, events: Events, ledger: Path, decode: Decode | None, sections: tuple[EvaluationSection, ...]
    ) -> None:
        self._events, self._ledger, self._decode = events, ledger, decode
        self._silent = {section.name: section for section in sections if section.canary}

    def __call__(self, event: Event) -> None:
        if event.kind != "evaluated" or event.fields["name"] not in self._silent:
            return
        name, version = event.fields["name"], event.fields["version"]
        try:
            reason = self._warning(self._silent[name], version)
        except Exception as error:
            reason = f"canaries are no longer watched: {type(error).__name__}: {error}"
            self._silent.clear()
        if reason:
            self._silent.pop(name, None)
            self._events.emit("warned", source="canary", reason=reason)

    def _warning(self, section: EvaluationSection, version: int) -> str:
        with LedgerReader(self._ledger, check=False) as reader:
            texts = earning(reader, section.name, version, self._decode)
        least = section.correct_at if section.canary == "wrong-gold" else 0.0
        texts = [text for text in texts if reaches(text.reward, least)]
        if not texts:
            return ""
        chance = " With a wrong gold answer this may be chance." if section.canary == "wrong-gold" else ""
        return (
            f"canary {section.name}: at version {version}, {len(texts)} completions earn a reward that none "
            f"deserves.{chance} Row {texts[0].row_id}: reward {texts[0].reward:.3g} for "
            f"{clipped(texts[0].completion, SHOWN_CHARACTERS)!r}"
        )


# ---------------------------------------------------------------- to print and to show


HEAD = ("run", "steps", "schedule", "dtype", "end")
WIDTH = 80


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a run. Its text is what `millrace doctor` prints.

    A finding has its `fault`, `evidence` and `advice`. `withdrawn`: findings that no longer hold. `inert`:
    keys of the configuration that change nothing. `committed`: the newest version in the ledger.
    `bottleneck`: what the speed depends on most. It is no fault.
    """

    run: str
    steps: int
    committed: int
    schedule: str
    dtype: str
    end: str
    inert: tuple[str, ...]
    healthy: bool
    findings: tuple[Finding, ...]
    withdrawn: tuple[str, ...]
    bottleneck: Bottleneck

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        return as_text(self, WIDTH, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for name in HEAD:
            yield Text(f"{name:10} {getattr(self, name)}")
        for line in self.inert:
            yield Text(f"{'note':10} {line}")
        if self.healthy:
            yield Text(f"\nNone of {len(RULES)} known faults.", "green")
        for line in self.withdrawn:
            yield Text(f"  {line}")
        for finding in self.findings:
            yield Text(f"\n{finding.fault}", "bold red")
            yield from (Text(f"  it shows: {line}") for line in finding.evidence)
            yield from (Text(f"  change:   {line}") for line in finding.advice)
        yield Text(f"\n{'bottleneck':10} {self.bottleneck}")

    def _repr_html_(self) -> str:
        return str(wing("ui.html")(self))


def diagnosis_of(run: RunDirectory) -> Diagnosis:
    """Raises: as `examine`."""
    record = examine(run)
    lists = {name: tuple(record[name]) for name in ("inert", "withdrawn")}
    findings = tuple(Finding(**one) for one in record["findings"])
    slow = Bottleneck(**record["bottleneck"])
    return Diagnosis(**record | lists | {"findings": findings, "bottleneck": slow})
