"""The costs and the workload of a real run, read from its directory, for simulations of the next run.

    replicas   `replica_costs`
    messages   half of the time from a publish to the end of its staging, without the staging
    trainer    seconds from a taken batch to its commit = a + b tokens, without messages     least squares
    digest     from copied to published; the trainer is free as soon as a version is copied  mean
    publish, stage, pull, swap, score, load, save, spawn                                     means
    lengths    whole groups of the ledger, as observed; with an environment, turns and answers of the events

All roles share a machine: on few cores the times of a schedule include its contention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from millrace.config.freeze import restore
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import DataError, boundary
from millrace.core.events import Event
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace_sim.calibrate.achieved import WARM_UP_STEPS, Achieved, newest_session
from millrace_sim.calibrate.observed import ObservedGroups, ObservedTurns
from millrace_sim.calibrate.replica_costs import decode_costs, fit, handover_s, mean
from millrace_sim.costs.interface import Costs
from millrace_sim.costs.workload import Empirical, Workload
from millrace_sim.simulation import Scale, Scenario
from millrace_sim.virtual.faults import Faults, Latency

SLICE_S = 0.02
"""A real replica decodes for so long. Then it takes commands and reports what finished."""
NUM_PROMPTS = 256
"""Prompts read from the ledger for their lengths."""
EVENTS_CHECKED = 1000
"""After so many events that were read it is asked whether to go on."""
NUM_SCORES_MIN = 20
"""With so many scores from a full queue, only those scores count."""


@dataclass(frozen=True)
class Calibration:
    """A measured run. `scenario` simulates it, with its configuration or with another."""

    config: Config
    costs: Costs
    workload: Workload
    faults: Faults  # how long workers take to start; nothing fails
    latency: Latency
    achieved: Achieved

    def scenario(self, config: Config | None = None, *, seed: int = 0) -> Scenario:
        return Scenario(
            config or self.config,
            seed=seed,
            costs=self.costs,
            workload=self.workload,
            faults=self.faults,
            latency=self.latency,
            scale=Scale(slice_s=SLICE_S),
        )


def calibrate(run_dir: Path | str, check: Callable[[], None] = lambda: None) -> Calibration:
    """Read `config.json`, `events.jsonl` and `ledger.sqlite` of a run that has trained some steps. `check` is
    called often, and may raise to end this.

    Raises: DataError, LedgerError: data is missing or too short to measure. The message names it.
    """
    path = Path(run_dir)
    try:
        recorded = files.read_json(path / "config.json")
        events = []
        for number, event in enumerate(read_events(path / "events.jsonl")):
            events.append(event)
            if number % EVENTS_CHECKED == 0:
                check()
    except OSError as error:
        raise DataError(f"{path} is not a run directory: {error}") from error
    with boundary(str(path / "config.json"), "cannot be read", DataError):
        config = restore(recorded, path / "config.json")
    with LedgerReader(path / "ledger.sqlite") as ledger:
        prompts = _prompt_lengths(ledger)
        return learn(events, config, lengths=ledger.lengths(), prompts=prompts, check=check)


def learn(
    events: Sequence[Event],
    config: Config,
    *,
    lengths: Sequence[int],
    prompts: Sequence[int],
    check: Callable[[], None] = lambda: None,
) -> Calibration:
    """`calibrate` from the content of the files: events, of which the newest session counts, completion
    lengths by trajectory id, some prompt lengths.

    Raises: DataError.
    """
    events = newest_session(events)
    spawns = [e.fields["spawn_s"] for e in events if e.kind == "worker_started" and e.fields["epoch"] == 1]
    message_s = _message_s(events)
    return Calibration(
        config=config,
        costs=_costs(events, config, fmean(prompts), call_s=2 * message_s, check=check),
        workload=_workload(events, config, lengths, prompts),
        faults=replace(Faults(), spawn_s=(min(spawns), max(spawns))),
        latency=Latency(base_s=message_s / 2, jitter_s=message_s / 2),
        achieved=Achieved.of(events),
    )


def _workload(
    events: Sequence[Event], config: Config, lengths: Sequence[int], prompts: Sequence[int]
) -> Workload:
    """With an environment, lengths are of single turns."""
    workload = Workload(
        prompt_tokens=_uniform_like(prompts),
        completion=ObservedGroups.of(lengths, config.batch.group_size),
    )
    turns = ObservedTurns.of(events) if config.reward.kind == "environment" else None
    if turns is None:
        return workload
    return replace(
        workload,
        completion=Empirical.of(turns.tokens),
        turns=_uniform_like(turns.num_turns),
        observation_tokens=round(fmean(turns.observations)),
        tool_s=Empirical.of(turns.answers_s),
        start_s=Empirical.of(turns.starts_s) if turns.starts_s else None,
        own_share=min(1.0, fmean(turns.own_prompts or [0]) / fmean(prompts)),
    )


# ---------------------------------------------------------------- costs


def _message_s(events: Sequence[Event]) -> float:
    """Mean seconds of a message: half of the time from a publish to the end of its staging, without the
    staging."""
    published = {e.fields["version"]: e.time_s for e in events if e.kind == "published"}
    staged = [e for e in events if e.kind == "staged" and e.fields["version"] in published]
    gaps = [e.time_s - published[e.fields["version"]] - e.fields["stage_s"] for e in staged]
    return max(0.0, mean(gaps)) / 2


def _costs(
    events: Sequence[Event], config: Config, prompt_tokens: float, *, call_s: float, check: Callable[[], None]
) -> Costs:
    base_s, token_s, prefill_s, contention = decode_costs(events, check)
    step_base_s, train_token_s = _training(events, config, prompt_tokens)
    published = [e.fields for e in events if e.kind == "published"]
    if not published:
        raise DataError("the run published no version: nothing about weights can be learned from it")
    return Costs(
        decode_base_s=base_s,
        decode_per_sequence_s=token_s,
        contention=contention,
        handover_s=handover_s(events, call_s),
        prefill_per_token_s=prefill_s,
        pull_s=mean([e.fields["pull_s"] for e in events if e.kind == "pulled"]),
        swap_s=mean([e.fields["swap_s"] for e in events if e.kind == "pulled"]),
        step_base_s=max(0.0, step_base_s - call_s),
        train_per_token_s=train_token_s,
        publish_s=max(0.0, mean(list(_publish_s(events))) - call_s),
        digest_s=mean([_digest_s(e) for e in events if e.kind == "published"]),
        stage_s=mean([e.fields["stage_s"] for e in events if e.kind == "staged"]),
        snapshot_s=mean([e.fields.get("stall_s", 0.0) for e in events if e.kind == "checkpoint"]),
        save_s=mean([e.fields["save_s"] for e in events if e.kind == "checkpoint"]),
        score_s=_score_s(events, config.reward.workers),
        weights_bytes=published[-1]["weights_bytes"],
    )


def _training(events: Sequence[Event], config: Config, prompt_tokens: float) -> list[float]:
    """Seconds of a step whatever its size, and of a token in it (prompts are trained with each completion).

    A slope that is smaller than the noise becomes about 0, and the base has the rest.
    """
    rows, seconds = [], []
    free_s: float | None = None
    num_steps = 0  # the first warm up allocators and caches; replayed steps did not wait
    for event in events:
        if event.kind == "published":
            free_s = event.time_s - _digest_s(event)
        elif event.kind == "step" and not event.fields["replayed"]:
            num_steps += 1
            if free_s is None or num_steps <= WARM_UP_STEPS:
                continue
            prompts = prompt_tokens * config.trajectories_per_step
            rows.append((1.0, event.fields["trained_tokens"] + prompts))
            seconds.append(event.time_s - free_s - event.fields["wait_s"])
    if len(rows) < 3:
        raise DataError(
            f"{len(rows)} steps after the first {WARM_UP_STEPS}: 3 are the least to fit the time of one"
        )
    return fit(rows, seconds)


def _publish_s(events: Sequence[Event]) -> Iterator[float]:
    """Seconds from a step to the copy that follows at once in the trainer."""
    trainer = [e for e in events if e.kind in ("step", "published")]
    for before, now in pairwise(trainer):
        if before.kind == "step" and now.kind == "published":
            yield now.time_s - _digest_s(now) - before.time_s


def _digest_s(published: Event) -> float:
    """Seconds of the digest, during the next step. Earlier runs count the digest in the stall."""
    return float(published.fields.get("digest_s", 0.0))


def _score_s(events: Sequence[Event], workers: int) -> float:
    """Mean seconds of a score in a queue that `workers` serve in order.

    Measured from one score to the next while completions wait, which excludes the messages. If completions
    hardly ever waited, measured from completion to score.
    """
    finished: dict[int, float] = {}
    scored: list[float] = []
    queued: list[float] = []
    alone: list[float] = []
    for event in events:
        if event.kind == "finished":
            finished[event.fields["trajectory_id"]] = event.time_s
        elif event.kind == "scored" and event.fields["trajectory_id"] in finished:
            ready_s = finished.pop(event.fields["trajectory_id"])
            free_s = scored[-workers] if len(scored) >= workers else 0.0
            (queued if ready_s <= free_s else alone).append(event.time_s - max(ready_s, free_s))
            scored.append(event.time_s)
    return mean(queued if len(queued) >= NUM_SCORES_MIN else alone + queued)


def _prompt_lengths(ledger: LedgerReader) -> list[int]:
    ids = [group_id for step in ledger.steps() for group_id in step.group_ids][:NUM_PROMPTS]
    return [len(ledger.group(group_id).prompt) for group_id in ids] or [1]


def _uniform_like(lengths: Sequence[int]) -> tuple[int, int]:
    """The range whose uniform distribution has the mean and about the deviation of `lengths`."""
    middle = fmean(lengths)
    low = max(1, round(middle - 3**0.5 * pstdev(lengths)))
    return low, max(low, round(2 * middle - low))
