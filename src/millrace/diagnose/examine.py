"""The findings of the doctor in a run directory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any

from millrace.config.inert import inert
from millrace.config.schema import Config
from millrace.config.tables.generation import SamplingConfig
from millrace.conversations.tokenizer import open_decoder
from millrace.core.errors import DataError
from millrace.core.types import State
from millrace.diagnose.bottleneck import Bottleneck, bottleneck
from millrace.diagnose.evidence import Evidence, RewardRange
from millrace.diagnose.rewarded_texts import read_texts
from millrace.diagnose.rules import diagnose, gone
from millrace.diagnose.time_use import TimeUse, TimeUseLog
from millrace.ledger.reading.reader import LedgerReader
from millrace.observe.sinks.jsonl import replay_events
from millrace.observe.sinks.log_files import parts
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
        config.rollout.quantization or config.model.dtype,
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
