"""The one role or rule that a run's speed depends on most, with the reason. Pure.

The trainer makes the versions, so its time is the run's time. If it hardly waits, and replicas do, it is the
bottleneck itself. If it waits, the bottleneck is what the replicas did meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.diagnose.time_use import (
    BATCH,
    BOUND,
    CHECKPOINT,
    COMPUTING,
    DECODING,
    NO_WORK,
    OTHER,
    PUBLISHING,
    REWARDS,
    TAIL,
    WEIGHTS,
    TimeUse,
    share,
)

STEPS_MIN = 2
BUSY = 0.85
"""A controller or replicas that work for this share of the time, or more, count as always busy. So does a
trainer that waits for less than the rest."""
TURNS = 0.25
"""Trainer and replicas take turns: each waits for this share of its time, or more, while the other works."""
EMPTY = 0.5
"""Fewer of a replica's slots in use than this share, while it decodes: a long tail, or too little work."""


LONG_TAIL = "generation, long tail"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`name` of the role or the rule; `reason` with the shares of time; `advice` names keys."""

    name: str
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f". {self.advice}" if self.advice else "")


def bottleneck(use: TimeUse, *, slots: int, colocated: bool = False, episodes: bool = False) -> Bottleneck:
    """`slots` of each replica. `colocated`: trainer and replicas use one device in turns. `episodes`: an
    environment answers between turns."""
    if use.steps < STEPS_MIN:
        reason = f"timed steps: {use.steps}, of at least {STEPS_MIN}. A session does not time its first"
        return Bottleneck("unknown", reason)
    waits = share(use.trainer, BATCH)
    works = sum(share(use.trainer, cause) for cause in (COMPUTING, PUBLISHING, CHECKPOINT))
    if use.controller is not None and use.controller >= BUSY:
        return Bottleneck("controller", f"its process used {use.controller:.0%} of a core", _CONTROLLER)
    if colocated:
        return _in_turns(use, waits, works)
    if waits < 1 - BUSY:
        if use.replica_share(DECODING) < BUSY:
            return _trainer(use, waits)
        return Bottleneck("none", f"{_both(use, waits)}: trainer and replicas are in balance", _BALANCE)
    return _while_it_waited(use, waits, slots=slots, episodes=episodes)


def _in_turns(use: TimeUse, waits: float, works: float) -> Bottleneck:
    side, most = ("trainer", works) if works >= waits else ("generation", waits)
    reason = f"the device is lent in turns, and {most:.0%} of the time was for this side"
    return Bottleneck(side, reason, _TRAINER if side == "trainer" else _GENERATION)


def _trainer(use: TimeUse, waits: float) -> Bottleneck:
    parts = {cause: share(use.trainer, cause) for cause in _OF_TRAINER}
    most = max(parts, key=lambda cause: parts[cause])
    shares = ", ".join(f"{cause} {part:.0%}" for cause, part in parts.items() if part >= 0.01)
    idle = 1 - use.replica_share(DECODING)
    reason = f"it waited {waits:.0%} of the time for batches ({shares}), and replicas were idle {idle:.0%}"
    return Bottleneck("trainer" if most == COMPUTING else f"trainer, {most}", reason, _OF_TRAINER[most])


def _while_it_waited(use: TimeUse, waits: float, *, slots: int, episodes: bool) -> Bottleneck:
    causes = {cause: share(use.waits, cause) for cause in (DECODING, REWARDS, WEIGHTS, NO_WORK)}
    decoding, tail = causes[DECODING], share(use.waits, TAIL)
    causes[DECODING] += tail  # while any replica decodes, the trainer waits for generation
    most = max(causes, key=lambda cause: causes[cause])
    waited = f"the trainer waited {waits:.0%} of the time for batches"
    if not use.waits:
        return Bottleneck("generation", f"{waited}; no replica reported what it did", _GENERATION)
    if most == REWARDS:
        idle = f"{waited}, and replicas were idle {causes[most]:.0%} of that time, while"
        reason = f"{idle} {use.scoring or 0.0:.1f} completions on average waited for a reward"
        return Bottleneck("environment" if episodes else "rewards", reason, _REWARDS)
    if most == WEIGHTS:
        reason = f"{waited}, and replicas took new weights for {causes[most]:.0%} of that time"
        return Bottleneck("weights", reason, _WEIGHTS)
    if most == NO_WORK:
        reason = f"{waited}, and replicas had nothing to do for {causes[most]:.0%} of that time"
        return Bottleneck("supply of work", reason, _SUPPLY)
    paused = use.replica_share(BOUND)
    if paused >= TURNS <= waits:
        reason = f"{waited}, and replicas paused {paused:.0%} of the time while the trainer worked"
        return Bottleneck("staleness bound", f"{reason}: they take turns", _BOUND)
    if tail > decoding:
        done = f"replicas waited {tail:.0%} of that time for the longest completions of others"
        return Bottleneck(LONG_TAIL, f"{waited}, and {done}", _TAIL)
    busy = f"{waited}, and replicas were busy {decoding:.0%} of that time"
    if use.running is not None and use.running < EMPTY * slots:
        return Bottleneck("generation", f"{busy}, with {use.running:.1f} of {slots} slots in use", _TAIL)
    return Bottleneck("generation", busy, _GENERATION)


def _both(use: TimeUse, waits: float) -> str:
    busy = use.replica_share(DECODING)
    return f"the trainer waited {waits:.0%} of the time, and replicas were busy {busy:.0%}"


_GENERATION = "More `rollout.replicas` or `rollout.slots`, or a smaller `sampling.max_tokens`"
_TAIL = "A larger staleness bound or a smaller `sampling.max_tokens` helps more than devices: slots are empty"
_REWARDS = "More `reward.workers`, or a faster reward: `millrace try-task` shows the seconds of a call"
_WEIGHTS = "Smaller versions (an adapter), or faster links between hosts"
_SUPPLY = "Look at restarts, at slow prompts of the task, and at who waits in `stalled` events"
_BOUND = "A larger staleness bound, or more batches ahead"
_BALANCE = "Faster is only more of both: replicas and ranks of the trainer"
_CONTROLLER = "Longer `rollout.report_interval_s`, and fewer and larger replicas"
_TRAINER = "More ranks of the trainer (`trainer.shard`), or a larger `batch.token_budget`"
_OF_TRAINER = {
    COMPUTING: _TRAINER,
    PUBLISHING: "Train an adapter: its versions are small",
    CHECKPOINT: "A larger `checkpoints.every`, or a faster disk",
    OTHER: "Look at `step_rejected` and `worker_died` events: their work is in no step that counts",
}
