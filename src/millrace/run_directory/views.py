"""Trajectories and evaluations of a run as plain JSON types, from its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from millrace.config.schema import Config
from millrace.controller.evaluation import due
from millrace.core.completion.marked import unmarked
from millrace.core.errors import MillraceError
from millrace.core.types import EvaluationAttempt, EvaluationRecord, Group, Prompt, Trajectory
from millrace.estimates.evaluation import figure
from millrace.ledger.reading import LedgerReader
from millrace.observe.conversation_times import conversation, ended_by, recorded
from millrace.run_directory.run_directory import RunDirectory

View = dict[str, Any]


def evaluations_view(reader: LedgerReader, config: Config) -> list[View]:
    """Evaluations while training, in the order of their versions. `best` marks the best of each name."""
    records = reader.evaluations()
    by = {section.name: section.by for section in config.evaluations}
    best = {
        name: due.best([(r.version, figure(r.metrics, by.get(name, "greedy"))) for r in rows])
        for name in {record.name for record in records}
        if (rows := [r for r in records if r.name == name and not r.reason])
    }
    return [_evaluation_line(record, best.get(record.name) == record.version) for record in records]


def _evaluation_line(record: EvaluationRecord, best: bool) -> View:
    metrics, k = record.metrics, str(record.metrics.get("num_samples", 0))
    line: View = {"name": record.name, "version": record.version}
    for name, key in (("greedy", "greedy_accuracy"), ("pass", "pass_at_k"), ("majority", "majority_at_k")):
        value = metrics.get(key)
        line[name] = value.get(k) if isinstance(value, dict) else value
    low, high = metrics.get("intervals", {}).get("greedy_accuracy", (None, None))
    line |= {"greedy_low": low, "greedy_high": high, "samples": metrics.get("num_samples")}
    line |= {"reward": metrics.get("reward_mean"), "took_s": record.took_s, "best": "best" if best else ""}
    return line | {"skipped": record.reason}


def completions_of(reader: LedgerReader, name: str, version: int, tokenizer: Any | None) -> list[View]:
    return [_completion(one, version, tokenizer) for one in reader.attempts(name, version)]


def _completion(one: EvaluationAttempt, version: int, tokenizer: Any | None) -> View:
    columns = unmarked(one.tokens, version)
    turns = [] if columns.sampled() is None else conversation(columns, {}, tokenizer and tokenizer.decode)
    return {
        "row_id": one.row_id,
        "attempt": one.attempt,
        "version": version,
        "reward": one.reward,
        "reason": one.reason,
        "finish": one.finish.value,
        "num_tokens": len(columns),
        "completion": tokenizer.decode(columns.tokens.tolist()) if tokenizer else None,
        **({"turns": turns} if turns else {}),
    }


def trajectory_record(
    group: Group | Prompt, trajectory: Trajectory, tokenizer: Any | None, *, tokens: bool
) -> View:
    """One trajectory as a flat record. With `tokens` the record has the columns of tokens."""
    decode = partial(_as_the_reward_saw_it, tokenizer) if tokenizer else None
    record = outcome(group, trajectory) | {
        **{f"reward/{name}": value for name, value in trajectory.metrics.items()},
        "num_tokens": len(trajectory.columns),
        "trained_version": trajectory.trained_version,
        "staleness": staleness_of(trajectory, trajectory.trained_version),
        "replica": trajectory.replica,
        "leases": trajectory.lease,
        "prompt": group.text,
        "completion": decode(trajectory.columns.tokens.tolist()) if decode else None,
        **turn_fields(conversation(trajectory.columns, trajectory.metrics, decode), trajectory),
    }
    if not tokens:
        return record
    logprobs, versions = recorded(trajectory.columns)
    return record | {
        "tokens": trajectory.columns.tokens.tolist(),
        "logprobs": logprobs,
        "versions": versions,
    }


def turn_fields(turns: list[View], trajectory: Trajectory) -> View:
    """Fields of an episode; empty: the trajectory is none."""
    return {"turns": turns, "ended_by": ended_by(trajectory.metrics)} if turns else {}


def outcome(group: Group | Prompt, trajectory: Trajectory) -> View:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": group.group_id,
        "row_id": group.row_id,
        "state": trajectory.state.value,
        "reason": trajectory.reason,
        "finish": trajectory.finish.value if trajectory.finish else None,
        "reward": trajectory.reward,
    }


def _as_the_reward_saw_it(tokenizer: Any, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def staleness_of(trajectory: Trajectory, trained_version: int | None) -> int | None:
    """The staleness of the oldest token when the trajectory was trained."""
    if trained_version is None or not trajectory.columns:
        return None
    return trained_version - 1 - min(version for version, _ in trajectory.columns.sampled_runs)


def tokenizer_of(run: RunDirectory) -> Any | None:
    """The model's tokenizer, if it still exists at the run's `model.path`."""
    from millrace.conversations.tokenizer import load_tokenizer

    try:
        return load_tokenizer(run.read_config().model.path)
    except MillraceError:
        return None
