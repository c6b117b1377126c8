"""The nouns that all layers share. Plain data: methods only derive values from fields.

Messages are frozen msgspec structs. The controller owns the mutable records `Trajectory` and `Group`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from millrace.core.completion.columns import Packed, TokenColumns, pack, token_array, unpack
from millrace.core.completion.forks import Fork
from millrace.core.turns.turn_bounds import NO_BOUNDS, UNBOUNDED, EpisodeBounds, TurnBounds

# ---------------------------------------------------------------- lifecycle


class State(StrEnum):
    """Where a trajectory is. Live states lead to exactly one terminal state, which has a reason."""

    QUEUED = "queued"  # admitted, no replica works on it
    LEASED = "leased"  # one replica may work on it
    WAITING = "waiting"  # a turn is complete, and the environment has not answered
    GENERATED = "generated"  # complete, reward not yet known
    SCORED = "scored"  # reward known, its group is not complete
    BUFFERED = "buffered"  # its group is complete and may be taken
    TRAINED = "trained"  # part of a batch that was applied
    REJECTED = "rejected"  # ends untrained, and nothing failed: the reason says why
    STALE = "stale"  # too old to be trained on
    ABANDONED = "abandoned"  # a member of its group kills replica after replica
    FAILED = "failed"  # the environment or the reward raised


TERMINAL = frozenset({State.TRAINED, State.REJECTED, State.STALE, State.ABANDONED, State.FAILED})
LIVE = frozenset(State) - TERMINAL


class Finish(StrEnum):
    """Why generation ended."""

    TURN = "turn"  # one turn is complete; the environment decides whether another one follows
    STOP = "stop"  # a stop token or stop string, or the end of the episode
    LENGTH = "length"  # the token budget: truncated


# ---------------------------------------------------------------- generation


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn, as section `sampling` of the configuration says. `temperature` 0 is greedy.

    Order: penalties, banned tokens, logits / temperature, then min-p, top-k, top-p, then renormalise.
    Recorded log-probs are of that final distribution; greedy tokens record the log-prob at temperature 1
    without min-p, top-k and top-p. An end token is part of the completion. A stop string ends the trajectory
    with the token that completes the string."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    token_masks: bool = True
    routing: bool = False

    @property
    def cuts(self) -> bool:
        """Whether improbable tokens are never drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def edits(self) -> bool:
        """Whether logits are edited before the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or self.allowed_token_ids is not None or bool(self.banned_token_ids)


class Prompt(msgspec.Struct, frozen=True):
    """A function of (data set, run seed, group id). `bounds`: of the first turn."""

    group_id: int
    row_id: str
    tokens: array[int]
    text: str
    bounds: TurnBounds = NO_BOUNDS
    row_digest: str = ""


RESTS = "rests: "
"""The reason of a prompt that was not taken because its row rests begins so."""


class BadPrompt(msgspec.Struct, frozen=True):
    """A row that cannot be a prompt (broken, or too long), or that rests; skipped and counted."""

    group_id: int
    row_id: str
    reason: str


class Work(msgspec.Struct, frozen=True):
    """A lease: generate this trajectory, from `tokens` on (already sampled, perhaps by another replica).

    `lease` counts the leases of this trajectory; progress with another lease is refused, and a repeat changes
    nothing. `sampling.max_tokens - len(tokens)` tokens are left. The present turn began with
    `tokens[turn_start]`: what is before ends nothing. `earlier`: completions of its row, for drafts."""

    trajectory_id: int
    group_id: int
    lease: int
    prompt: array[int]
    tokens: array[int]
    sampling: Sampling
    seed: int
    turn_start: int = 0
    earlier: list[array[int]] = []


class Progress(msgspec.Struct, frozen=True):
    """Tokens [start, start + len(columns)) of a completion."""

    trajectory_id: int
    lease: int
    start: int
    columns: TokenColumns
    finish: Finish | None = None


class ReplicaLoad(msgspec.Struct, frozen=True):
    """A replica's load. Counters are cumulative since the replica started."""

    version: int
    running: int = 0  # trajectories in decode slots
    waiting: int = 0  # accepted, no slot yet
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    steps_since_swap: int = 0  # decode steps under the current version
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0  # of earlier turns, whose keys and values were still there
    evicted_tokens: int = 0  # of trajectories between turns, whose keys and values made room
    drafted_tokens: int = 0  # guessed, and verified
    accepted_tokens: int = 0  # of these, right
    busy_s: float = 0.0
    idle_s: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """One message of a replica's report stream. Pickled, a report is a few buffers, for any number of
    trajectories. `leaving`: the replica's process was told to end, and the replica asks to be emptied."""

    progress: list[Progress]
    load: ReplicaLoad
    leaving: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        headers = [(p.trajectory_id, p.lease, p.start, p.finish) for p in self.progress]
        packed = pack([p.columns for p in self.progress])
        return _unpacked_report, (headers, packed, self.load, self.leaving)


def _unpacked_report(
    headers: list[tuple[int, int, int, Finish | None]], packed: Packed, load: ReplicaLoad, leaving: bool
) -> Report:
    progress = [
        Progress(trajectory_id, lease, start, columns, finish)
        for (trajectory_id, lease, start, finish), columns in zip(headers, unpack(packed), strict=True)
    ]
    return Report(progress, load, leaving)


# ---------------------------------------------------------------- rewards


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """`answer`: the answer in the completion, for counts of equal answers; None: nothing counts them.
    `truncated`: a budget of the episode ended it."""

    value: float
    metrics: dict[str, float] = {}
    answer: str | None = None
    truncated: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The reward raised, timed out or broke its contract. Never a zero, never in a baseline."""

    reason: str


class Abstain(msgspec.Struct, frozen=True, tag="abstain"):
    """The reward has no opinion; the trajectory is rejected and does not enter a baseline."""

    reason: str = "the reward abstained"


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """The environment has answered. `bounds`: of the model's next turn. `metrics` join earlier ones. `tokens`
    follow the trajectory, its first `after` tokens (`Fork`), or `kept` tokens of the prompt (`after` 0).
    `begins`: the episode begins, and nothing that came before counts. Then `tokens` are the trajectory's own
    end of the prompt; none: its prompt is the group's."""

    tokens: array[int]
    metrics: dict[str, float] = {}
    after: int | None = None
    kept: int = 0
    bounds: TurnBounds = NO_BOUNDS
    begins: bool = False


Score = Scored | Failed | Abstain


class ScoreRequest(msgspec.Struct, frozen=True):
    """`turns`: (start, stop, sampled) of sampled and observed tokens from the first sampled one; empty: one.
    `room`: tokens that may follow. `spent_s`: ENVIRONMENT_S of earlier turns. `logprobs`, `row_digest`:
    empty: not known. `begins`: nothing was sampled, and the episode is to begin. `known`: so many tokens of
    the trajectory are left out, with all that belongs to them: the worker has them. None: none are."""

    trajectory_id: int
    group_id: int
    tokens: array[int]
    finish: Finish
    turns: list[tuple[int, int, bool]] = []
    room: int = 0
    spent_s: float = 0.0
    prompt: array[int] = msgspec.field(default_factory=token_array)
    forks: list[Fork] = []
    logprobs: array[float] = msgspec.field(default_factory=lambda: array("f"))
    row_digest: str = ""
    begins: bool = False
    known: int | None = None


# ---------------------------------------------------------------- training


class TrainSequence(msgspec.Struct, frozen=True):
    """A completion to train on. `mask` is the loss mask: which tokens are trained; None: all of them.
    `metrics`: of the reward function. `reference`: log-probs of its tokens under the reference, float32, NaN
    for tokens that are not trained; None: the trainer computes them."""

    trajectory_id: int
    columns: TokenColumns
    reward: float
    truncated: bool
    mask: Sequence[bool] | None = None
    metrics: dict[str, float] = {}
    reference: array[float] | None = None

    @property
    def num_trained(self) -> int:
        """Tokens that are trained."""
        return len(self.columns) if self.mask is None else sum(self.mask)


class TrainGroup(msgspec.Struct, frozen=True):
    """Sequences that share a prompt and are compared with each other (two or more)."""

    group_id: int
    prompt: array[int]
    sequences: list[TrainSequence]


class Batch(msgspec.Struct, frozen=True):
    """The groups that one version consumes: the batch takes version `version` to `version + 1`."""

    version: int
    groups: list[TrainGroup]


class StepResult(msgspec.Struct, frozen=True):
    """`version`: after the batch. `logprob_gap` maps staleness to (mean, max, tokens)."""

    version: int
    metrics: dict[str, float]
    logprob_gap: dict[int, tuple[float, float, int]]
    trained_tokens: int
    step_s: float


class StepRejected(msgspec.Struct, frozen=True):
    """The batch cannot be trained on; the version is unchanged. `trajectory_ids` are at fault: all of the
    batch if the trainer cannot tell which. `weights_lost`: the trainer must load again before its next batch.
    `unfit`: the trajectories are wrong under any weights. Not `unfit`: a loss or gradient is not finite, and
    the weights may be the reason."""

    version: int
    trajectory_ids: list[int]
    reason: str
    weights_lost: bool = False
    unfit: bool = False


# ---------------------------------------------------------------- weights


class Endpoint(msgspec.Struct, frozen=True):
    """A host's weight slots, at a path that any process of this run on the host can open. `address`: where
    their relay serves the relays of other hosts, HOST:PORT; empty: it serves none."""

    kind: str
    path: str
    slots: int
    slot_bytes: int
    address: str = ""


class Published(msgspec.Struct, frozen=True):
    version: int
    digest: str  # of the source tensors, by the trainer, made of the blocks that its ranks have
    weights_bytes: int
    stall_s: float  # how long training waited: for the copy, and in an update for the digest
    digest_s: float = 0.0  # from the copy until the digest was complete


class Staged(msgspec.Struct, frozen=True):
    version: int
    digest: str  # of the relay's bytes, over complete tensors
    versions: list[int]  # versions that replicas of its host can read, oldest first
    stage_s: float  # until the version was complete here
    source: str = ""  # address of the relay that sent the version; of the last one, if several did
    received_bytes: int = 0  # over the network
    decoded_bytes: int = 0  # the received bytes after decoding
    encodings: dict[str, int] = {}  # received chunks of each kind: the kinds of deltas, raw, nixl
    delta_versions: list[int] = []  # here as deltas: other hosts cannot get these
    dropped: dict[int, str] = {}  # versions that became unreadable since the last answer, and why


class Stored(msgspec.Struct, frozen=True):
    """How the last version was written to the directory of weights. -1: none was. `digest`: as published."""

    version: int
    digest: str
    weights_bytes: int = 0
    written: dict[str, int] = {}  # anchor_bytes, delta_bytes, chunks of each kind; empty: it was there
    store_s: float = 0.0
    reason: str = ""  # why the version was not written; empty: it was


class Served(msgspec.Struct, frozen=True):
    version: int
    digest: str  # of the tensors that the engine computes with
    pull_s: float
    swap_s: float
    computes: str = ""  # in which number format, and whether exactly; for people


class TrainerState(msgspec.Struct, frozen=True):
    """A trainer that has loaded. `slot_bytes`: of one version in a relay. `arithmetic`: all that decides how
    steps are rounded; empty: a repeated step may differ in its last bits."""

    version: int
    slot_bytes: int
    computes: str = ""  # in which number format; for people
    arithmetic: str = ""


class CheckpointInfo(msgspec.Struct, frozen=True):
    """`save_s`: until the files were complete. `stall_s`: how long training waited; not in the ledger."""

    version: int
    path: str
    save_s: float
    stall_s: float = 0.0


# ---------------------------------------------------------------- the two records


@dataclass(slots=True)
class Trajectory:
    """One attempt at one prompt: the accountable unit. `columns` grow; a restart takes new ones."""

    trajectory_id: int
    group_id: int
    state: State = State.QUEUED
    reason: str = ""
    replica: str = ""
    epoch: int = 0
    lease: int = 0
    columns: TokenColumns = field(default_factory=TokenColumns)
    finish: Finish | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trained_version: int | None = None  # the version after its batch
    bounds: EpisodeBounds = UNBOUNDED

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL


@dataclass(slots=True)
class Group:
    """Trajectories of one prompt, with its `row_digest`. `group_id` is the position in the data stream."""

    group_id: int
    row_id: str
    prompt: array[int]
    text: str
    members: list[Trajectory]
    row_digest: str = ""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Counts of trajectories. `balanced` is the conservation identity."""

    admitted: int = 0
    trained: int = 0
    rejected: int = 0
    stale: int = 0
    abandoned: int = 0
    failed: int = 0
    in_flight: int = 0

    @property
    def balanced(self) -> bool:
        ended = self.trained + self.rejected + self.stale + self.abandoned + self.failed
        return self.admitted == ended + self.in_flight


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version as it was published: the digest of its weights, and the trainer's arithmetic."""

    version: int
    digest: str
    arithmetic: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The trajectories of a batch, and its metrics."""

    version: int  # after the batch
    group_ids: list[int]
    trajectory_ids: list[int]
    metrics: dict[str, Any]


class GroupOutcome(msgspec.Struct, frozen=True):
    """The rewards of the trained members of a group, by trajectory id."""

    group_id: int
    row_id: str
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class EvaluationAttempt:
    """A completion that was evaluated: never trained on. `attempt` 0 is greedy. `tokens`: see
    `core.completion.marked`. `reward` None: there is none, for `reason`."""

    prompt_index: int
    row_id: str
    attempt: int
    tokens: array[int]
    finish: Finish
    reward: float | None
    answer: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The result of evaluation `name` of `version`. `reason`: why it was skipped; empty: it was done, with
    these `metrics`."""

    name: str
    version: int
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    took_s: float = 0.0
