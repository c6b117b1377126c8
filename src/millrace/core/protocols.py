"""What the controller commands. Roles are passive; every command is idempotent.

The controller knows these shapes and no concrete class. Methods of a role are called through a
`Handle`, which adds the deadline, the epoch and death.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from millrace.core.digest import Filling, NamedBuffer, NamedPiece, TensorSpec
from millrace.core.placement import HERE, Place
from millrace.core.types import (
    Accounting,
    BadPrompt,
    Batch,
    CheckpointInfo,
    Endpoint,
    EvaluationAttempt,
    EvaluationRecord,
    Group,
    Progress,
    Prompt,
    Published,
    Report,
    Score,
    ScoreRequest,
    Served,
    Staged,
    StepRecord,
    StepRejected,
    StepResult,
    Stored,
    TrainerState,
    Trajectory,
    VersionRecord,
    Work,
)

# ---------------------------------------------------------------- runtime


@runtime_checkable
class Handle(Protocol):
    """One incarnation of one worker.

    `dead` is a future that resolves (never raises) to a human-readable cause when this incarnation is
    gone; calls and streams in flight then raise `WorkerDied`. A handle never comes back to life: a
    respawn under the same name is a new handle with a higher `epoch`.
    """

    name: str
    epoch: int
    dead: asyncio.Future[str]

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Await `worker.method(*args)`.

        Raises: the worker's own MillraceError; RemoteError for any other exception there;
        WorkerDied; DeadlineExceeded after `timeout_s` (the call may still take effect there).
        """

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Iterate what the worker's async generator `method(*args)` yields, in order, without loss.

        Closing the iterator cancels the generator there. Back-pressure is the consumer's pace.
        """

    def kill(self) -> None:
        """Stop it now (SIGKILL to its process group, or the simulated equal). Idempotent."""


class Runtime(Protocol):
    """Where workers run. `spawn` returns when the worker's constructor has returned."""

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> Handle:
        """Start `target` ("package.module:Class"), constructed with `kwargs`, as worker `name` at `place`.

        Raises: what the constructor raised (as `Handle.call` does); DeadlineExceeded; WorkerDied.
        """

    async def close(self) -> None:
        """Kill every worker and wait until none is left. Idempotent."""


# ---------------------------------------------------------------- roles


class Replica(Protocol):
    """One engine, serving exactly one version at a time (-1 before its first pull).

    It may have a method `notice()`, called when its process is told to end: from then on its reports say
    `leaving`."""

    def reports(self) -> AsyncIterator[Report]:
        """The one stream of a replica: batches of new tokens, and at least one report a second."""

    async def submit(self, works: list[Work]) -> None: ...

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        """Stop working on these and give back all of their tokens since `Work.tokens`.

        One `Progress` for each trajectory really released (empty if it has no new token). One that has
        finished and was not reported yet is given back with its `finish`, and is not reported again. Ids
        that are unknown, or were reported to their end, are left out, so releasing twice changes nothing."""

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        """Copy `version` into standby and digest it while decoding goes on, then swap between two decode
        steps. Trajectories in flight go on under it with their KV recomputed.
        Of the version that is served already nothing is copied: it is digested again.
        Raises: UnknownVersionError, TornVersionError (both: ask again for the newest),
        DigestMismatchError (fatal)."""


class Trainer(Protocol):
    async def load(self, checkpoint: str | None) -> TrainerState:
        """Initial weights (version 0) or a checkpoint directory."""

    async def step(self, batch: Batch) -> StepResult | StepRejected:
        """All optimizer steps of one batch. A repeat of the last applied batch version returns its result
        again. What is not finite is rejected, with what is at fault: a repeat of that batch is rejected
        again."""

    async def publish(self, *endpoints: Endpoint) -> None:
        """Copy the current version into slots of the relays at `endpoints`, one for each of the trainer's
        hosts in their order: what the ranks there hold of it. Training goes on while it is digested: nobody
        can read it before. A repeat copies nothing."""

    async def published(self) -> Published:
        """Wait until the version that was copied last is digested, and whole in its slot."""

    async def checkpoint(self, directory: str) -> None:
        """Begin to save everything as `directory`/`v{version:08d}`, atomically. Training goes on meanwhile.
        One checkpoint at a time: a second one first waits for the first."""

    async def saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        """Wait until the checkpoint that was begun last is complete. Old ones are removed, but for those of
        the versions `spared`."""

    async def export(self, directory: str) -> None:
        """Save the model and tokenizer as a Hugging Face directory."""


class Reference(Protocol):
    """The weights that a run began with. It only computes."""

    async def load(self, digest: str) -> str:
        """Load them, and say in which number format they are computed with. Raises: DigestMismatchError: they
        are not what version 0 was published as, with `digest`."""

    async def score(self, batch: Batch) -> list[array[float]]:
        """For each sequence, in order, what `TrainSequence.reference` is. A repeat gives the same bits."""


class Relay(Protocol):
    async def open(self, slot_bytes: int) -> Endpoint:
        """Allocate the slots (touching every page) and say where they are."""

    async def stage(self, version: int, digest: str) -> Staged:
        """Digest what the trainer wrote and, if equal to `digest`, make it pullable.
        Raises: UnknownVersionError, DigestMismatchError."""

    async def fetch(self, version: int, digest: str, sources: list[str]) -> Staged:
        """Get `version`, published with `digest`, from the first relay of `sources` that answers, and make it
        pullable. Sources are addresses, the preferred one first; they may still be receiving it themselves.

        It asks for what it lacks: a repeat with other sources goes on where the last one stopped. `Staged`
        names the source and what was received.
        A source with `://` is a directory or bucket; it is read when no relay could help.
        Raises: UnknownVersionError (no source has it, or will have it), DigestMismatchError,
        WeightsError (no source answers)."""

    async def store(self, version: int, digest: str) -> Stored:
        """Write a staged version to the directory of weights, some time soon. It says at once how the last
        one ended: ask again."""


class RewardWorker(Protocol):
    """Turns group ids into prompts and completions into scores. Any worker can serve any group."""

    async def prompts(self, group_ids: list[int]) -> list[Prompt | BadPrompt]:
        """Raises: OutOfMemory: one of these rows needs more than this worker has left."""

    async def row_ids(self, group_ids: list[int]) -> list[str]:
        """The names of their rows, without a look at these."""

    def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score]]:
        """Scores in the order of the requests, each yielded as soon as it is known.
        Raises: OutOfMemory: the next reward needs more than this worker has left."""


# ---------------------------------------------------------------- weights in a slot


class WeightsWriter(Protocol):
    """Writes versions into a relay's slots: each of a trainer's processes its own blocks. One trainer per
    relay. Readers of a slot that is written see it torn, never mixed."""

    def begin(self, version: int, manifest: Sequence[TensorSpec]) -> Filling:
        """By one process: take the oldest slot for these tensors. It is unreadable until `end`."""

    def fill(self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]) -> None:
        """By each process: copy its own blocks there."""

    def pin(self, register: Callable[[Any], Callable[[], None]]) -> None:
        """As a reader's."""

    def places(
        self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]
    ) -> list[Any]:
        """In place of `fill`, for who copies and digests by itself: the bytes in the slot for each block."""

    def end(
        self,
        filling: Filling,
        manifest: Sequence[TensorSpec],
        written: Iterable[NamedPiece],
        elsewhere: Iterable[NamedPiece] = (),
    ) -> str:
        """By the process that began, once all have filled: the digest of the version, made of its pieces.
        Theirs are taken of the blocks, not of the copy.
        `elsewhere`: those that were written into the slots of other hosts, from where the relay gets them.

        Raises: WeightsError: the pieces are not exactly the tensors, or another trainer took the slot."""

    def close(self) -> None: ...


class WeightsReader(Protocol):
    """Reads staged versions from a relay's slots, at any time, without any lock."""

    def held(self) -> list[int]:
        """Complete versions, oldest first."""

    def pin(self, register: Callable[[Any], Callable[[], None]]) -> None:
        """Have the slots registered with a GPU by `register`, which returns what undoes it, until `close`."""

    def read(
        self,
        version: int,
        into: Sequence[NamedBuffer],
        copy: Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None] | None = None,
    ) -> str:
        """Copy every tensor into the writable buffers of `into` and return the staged digest.

        Names, dtypes and shapes must agree exactly with the manifest. `copy` does it for buffers that are
        not in this process's memory: from the tensors in the slot, until all are copied.
        Raises: UnknownVersionError, TornVersionError, WeightsError (a tensor missing, left over, or
        of another dtype or shape: all are named)."""

    def view(self, version: int) -> AbstractContextManager[tuple[str, list[NamedBuffer]]]:
        """The staged digest, and the tensors where they lie, read-only: nothing is copied.

        Raises: UnknownVersionError; at exit TornVersionError: what was made of them means nothing."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- ledger


class Ledger(Protocol):
    """The durable record. Synchronous: a flush is a local transaction of milliseconds at most."""

    def recover(self) -> Recovered:
        """What the file holds, ready to go on from: for the start of a run, as it reads every live group."""

    def checkpoint(self) -> CheckpointInfo | None:
        """The newest complete one."""

    def steps_after(self, version: int) -> list[StepRecord]:
        """Committed steps, in order: after a checkpoint's version, what is to be done again."""

    def group(self, group_id: int) -> Group:
        """A group of a committed step, with its members and their tokens."""

    def admit(self, groups: Sequence[Group]) -> None: ...

    def skip(self, prompts: Sequence[BadPrompt]) -> None:
        """Record prompts that never became groups (their ids are used up)."""

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Record their present state; tokens already recorded are not written again."""

    def grow(self, trajectories: Sequence[Trajectory]) -> None:
        """They have new tokens and are otherwise as they were."""

    def commit_step(self, record: StepRecord) -> None:
        """Mark the step's trajectories trained, durably, together with its record."""

    def commit_checkpoint(self, info: CheckpointInfo) -> None: ...

    def published(self, version: int) -> list[VersionRecord]:
        """What it was published as, the first time first. A repeat that was rounded otherwise adds one."""

    def publish(self, record: VersionRecord) -> None: ...

    def evaluations(self) -> list[EvaluationRecord]:
        """Every one, in the order of their versions."""

    def evaluated(self, record: EvaluationRecord, attempts: Sequence[EvaluationAttempt]) -> None:
        """One evaluation, whole and durably. Each (name, version) once. Raises LedgerError."""

    def accounting(self) -> Accounting: ...

    def flush(self) -> Accounting:
        """Make everything so far durable, but for the newest tokens of some of those that only grew: their
        turn comes in one of the next. Raises LedgerError if the accounts do not close."""

    def close(self) -> None: ...


class Recovered(Protocol):
    """State found in the ledger."""

    next_group_id: int
    groups: list[Group]  # live groups, by id; queued and leased members keep their partial tokens
    version: int  # after the last committed step
    quarantined: list[str]  # ids of rows that are never to be drawn again
