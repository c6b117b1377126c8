"""The output of `millrace show` as plain JSON types, from the ledger and the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import msgspec

from millrace.core.errors import DataError, boundary
from millrace.core.events import Event
from millrace.core.fairness import Figures
from millrace.core.types import StepRecord, Trajectory
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import Sample
from millrace.observe.conversation_times import conversation, recorded
from millrace.observe.replica_times import Hosts
from millrace.observe.sinks.jsonl import read_events
from millrace.observe.sinks.log_files import parts
from millrace.run_directory.run_directory import RunDirectory, read_parent
from millrace.run_directory.views import (
    View,
    completions_of,
    evaluations_view,
    outcome,
    staleness_of,
    tokenizer_of,
    trajectory_record,
    turn_fields,
)
from millrace_ui.record.tokens import advantages_of

LAST_STEPS = 10
LAST_CHANGES = 20


def run_view(reader: LedgerReader, run: RunDirectory) -> View:
    """A run at a glance."""
    config, state = run.read_config(), reader.overview()
    last = reader.steps()[-LAST_STEPS:]
    members = {record.version: _members(reader, record) for record in last}
    with boundary(str(run.events), "its events do not make sense together", DataError):
        computes, fleet, hosts, window = _computes(run), _fleet(run), _hosts(run), _window(run)
    return {
        "run": str(run.path),
        "parent": None if (parent := read_parent(run)) is None else msgspec.to_builtins(parent),
        "state": _state(run, state.version >= config.steps),
        "version": state.version,
        "steps": config.steps,
        "schedule": config.schedule.kind,
        "computes": computes,
        "fleet": fleet,
        "checkpoint": state.checkpoint.path if state.checkpoint else None,
        "num_groups": state.num_groups,
        "num_skipped": state.num_skipped,
        "num_rested": state.num_rested,
        "num_tokens": state.num_tokens,
        "accounting": asdict(state.accounting),
        "states": state.states,
        "reasons": [[*key, num] for key, num in sorted(reader.reasons().items())],
        "replicas": _by_replica(t for trained in members.values() for t in trained),
        "hosts": hosts,
        "window": window,
        "evaluations": evaluations_view(reader, config)[-LAST_STEPS:],
        "last_steps": [_step_line(record, members[record.version]) for record in last],
    }


def _computes(run: RunDirectory) -> dict[str, str]:
    """The last report of each worker about its arithmetic."""
    if not parts(run.events):
        return {}
    return {e.fields["name"]: e.fields["computes"] for e in read_events(run.events, "computes")}


def _hosts(run: RunDirectory) -> dict[str, View]:
    """The versions that each host fetched from relays of other hosts. Empty with one host."""
    hosts, events = Hosts(), list[Event]()
    if parts(run.events):
        events = [event for kind in ("fetched", "fetch_missed") for event in read_events(run.events, kind)]
    for event in sorted(events, key=lambda event: event.wall_s):
        hosts(event)
    return hosts.as_json()


def _fleet(run: RunDirectory) -> list[View]:
    """The last changes of the fleet: who joined or left, why, and the number of replicas afterwards."""
    changes: list[View] = []
    num = 0
    kinds = ("run_started", "joined", "leaving")
    for event in read_events(run.events, *kinds) if parts(run.events) else ():
        if event.kind == "run_started":
            num = len(event.fields["replicas"])
            continue
        num += 1 if event.kind == "joined" else -1
        changes.append(
            {
                "at": datetime.fromtimestamp(event.wall_s).isoformat(" ", "seconds"),
                "replica": event.fields["replica"],
                "what": event.kind,
                "why": event.fields.get("reason", ""),
                "replicas": num,
            }
        )
    return changes[-LAST_CHANGES:]


def _window(run: RunDirectory) -> dict[str, float | None]:
    """Freshness and fairness of the last batches, as the last step reported them (`core.fairness`)."""
    newest: View = {}
    if parts(run.events):
        for step in read_events(run.events, "step"):
            window = step.fields.get("window")
            newest = window if isinstance(window, dict) else newest
    return asdict(Figures(0)) | newest


def step_view(reader: LedgerReader, version: int) -> View:
    """The step that made `version`: its trajectories and its measurements."""
    record = reader.step(version)
    trained = _members(reader, record)
    return {
        "version": version,
        "group_ids": record.group_ids,
        "reward_mean": _mean([t.reward for t in trained if t.reward is not None]),
        "metrics": record.metrics,
        "staleness": reader.staleness_histogram(version),
        "trajectories": [_trajectory_line(t) for t in trained],
    }


def trajectory_view(
    reader: LedgerReader, run: RunDirectory, trajectory_id: int, turn: int | None = None
) -> View:
    """One trajectory with every token: its position, version and log-prob, and with `sampling.logprobs` the
    top log-probs there. In an episode also its turn; with `turn` only what this turn and its answer have.

    Raises: DataError: there is no such turn.
    """
    trajectory = reader.trajectory(trajectory_id)
    group = reader.group(trajectory.group_id)
    advantages = advantages_of(group, run.read_config())
    tokenizer = tokenizer_of(run)
    turns = conversation(trajectory.columns, trajectory.metrics, tokenizer and tokenizer.decode)
    turn_of = [each["turn"] for each in turns for _ in range(each["tokens"])]
    if turn is not None and turn not in turn_of:
        raise DataError(f"trajectory {trajectory_id} has no turn {turn}: it has {max(turn_of, default=0)}")
    tokens = [
        _token_line(trajectory, i, tokenizer, turn_of)
        for i in range(len(trajectory.columns))
        if turn in (None, *turn_of[i : i + 1])
    ]
    turns = [each for each in turns if turn in (None, each["turn"])]
    return outcome(group, trajectory) | {
        "reward_metrics": trajectory.metrics,
        "lease": trajectory.lease,
        "replica": trajectory.replica,
        "epoch": trajectory.epoch,
        "trained_version": trajectory.trained_version,
        "advantages": advantages.of(trajectory),
        "advantages_unknown": advantages.unknown,
        "prompt": group.text,
        "completion": tokenizer.decode(trajectory.columns.tokens.tolist()) if tokenizer else None,
        **turn_fields(turns, trajectory),
        "tokens": tokens,
    }


def samples_view(samples: Sequence[Sample], tokenizer: Any | None) -> list[View]:
    """Trajectories as flat records. `versions` sampled the tokens of the trajectory."""
    return [
        trajectory_record(prompt, trajectory, tokenizer, tokens=False)
        | {"versions": sorted({version for version, _ in trajectory.columns.sampled_runs})}
        for prompt, trajectory in samples
    ]


def _members(reader: LedgerReader, record: StepRecord) -> list[Trajectory]:
    return [reader.trajectory(trajectory_id) for trajectory_id in record.trajectory_ids]


def _by_replica(trajectories: Iterable[Trajectory]) -> list[View]:
    """A trajectory counts for the replica that finished it."""
    owned: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        owned.setdefault(trajectory.replica, []).append(trajectory)
    return [
        {
            "replica": name,
            "epoch": max(t.epoch for t in own),
            "trajectories": len(own),
            "tokens": sum(len(t.columns) for t in own),
            "reward_mean": _mean([t.reward for t in own if t.reward is not None]),
            "moved_or_resumed": sum(t.lease > 1 for t in own),
        }
        for name, own in sorted(owned.items())
    ]


def _step_line(record: StepRecord, trained: list[Trajectory]) -> View:
    staleness = [staleness_of(t, record.version) for t in trained]
    return {
        "version": record.version,
        "trajectories": len(trained),
        "tokens": sum(len(t.columns) for t in trained),
        "reward_mean": _mean([t.reward for t in trained if t.reward is not None]),
        "staleness_max": max((oldest for oldest in staleness if oldest is not None), default=None),
        "loss": record.metrics.get("loss"),
    }


def _trajectory_line(trajectory: Trajectory) -> View:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "reward": trajectory.reward,
        "tokens": len(trajectory.columns),
        "finish": trajectory.finish.value if trajectory.finish else None,
        "staleness": staleness_of(trajectory, trajectory.trained_version),
        "replica": trajectory.replica,
        "lease": trajectory.lease,
    }


def _token_line(trajectory: Trajectory, position: int, tokenizer: Any | None, turn_of: Sequence[int]) -> View:
    token = trajectory.columns[position : position + 1]
    (logprob,), (version,) = recorded(token)
    line = {"position": position, **_logprob_line(token.tokens[0], logprob, tokenizer), "version": version}
    line |= {"turn": turn_of[position]} if turn_of else {}
    if token.top_logprobs is None:
        return line
    (top_logprobs,) = token.top_logprobs.rows()
    return line | {"top_logprobs": [_logprob_line(*one, tokenizer) for one in top_logprobs]}


def _logprob_line(token: int, logprob: float | None, tokenizer: Any | None) -> View:
    return {"token": token, "text": tokenizer.decode([token]) if tokenizer else None, "logprob": logprob}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _state(run: RunDirectory, complete: bool) -> str:
    if run.is_owned():
        return "running"
    return "finished" if complete else "stopped: train with --resume goes on"


def completions_view(reader: LedgerReader, run: RunDirectory, name: str) -> list[View]:
    """Of the newest version that evaluation `name` has measured. Raises: DataError: there is none."""
    records = reader.evaluations()
    versions = [one.version for one in records if one.name == name and not one.reason]
    if not versions:
        names = ", ".join(sorted({one.name for one in records if not one.reason})) or "none"
        raise DataError(f"{run.path} has no completions of an evaluation {name!r}: it has those of {names}")
    return completions_of(reader, name, max(versions), tokenizer_of(run))
