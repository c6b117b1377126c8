"""The interfaces of the roles that the controller commands. Roles are passive; every command is idempotent.

The controller knows these interfaces and no concrete class. It calls methods of a role through a `Handle`,
which adds the deadline, the epoch and the death of the worker.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from millrace.core.digest import Filling, NamedBlock, NamedBuffer, TensorSpec
from millrace.core.placement import HERE, Place
from millrace.core.turns.packed import PackedRequest
from millrace.core.types import (
    Accounting,
    BadPrompt,
    Batch,
    CheckpointInfo,
    Endpoint,
    EvaluationAttempt,
    EvaluationRecord,
    Group,
    GroupOutcome,
    Observed,
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


Done = Callable[[Any, Exception | None], None]
"""Gets the answer of a call, or its error."""


@runtime_checkable
class Handle(Protocol):
    """One incarnation of one worker.

    `dead` is a future that resolves (never raises) to a human-readable cause when this incarnation is
    gone. Calls and streams in flight then raise `WorkerDied`. A dead handle stays dead: a respawn under the
    same name is a new handle with a higher `epoch`.
    """

    name: str
    epoch: int
    dead: asyncio.Future[str]

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Await `worker.method(*args)`.

        Raises: the worker's own MillraceError; RemoteError for any other exception in the worker; WorkerDied;
        DeadlineExceeded after `timeout_s`, which may be infinite (the call may still take effect in the
        worker).
        """

    def call_then(self, method: str, *args: Any, done: Done) -> None:
        """Call `worker.method(*args)`, then `done` with its answer, or with the error that `call` would
        raise. There is no deadline, and no task of this process waits.

        Raises: WorkerDied: the worker is gone already; DataError: the arguments cannot be sent.
        """

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Iterate over the values of the worker's async generator `method(*args)`, in order, without loss.

        Closing the iterator cancels the generator in the worker. The generator waits for a slow consumer.
        """

    def kill(self) -> None:
        """Stop the worker now (SIGKILL to its process group, or the simulated equivalent). Idempotent."""


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

        Raises: the constructor's error (as `Handle.call` does); DeadlineExceeded; WorkerDied.
        """

    async def close(self) -> None:
        """Kill every worker and wait until none is left. Idempotent."""


# ---------------------------------------------------------------- roles


class Replica(Protocol):
    """One engine, serving exactly one version at a time (-1 before its first pull).

    It may have a method `notice()`, called when its process is told to end: from then on its reports say
    `leaving`."""

    def reports(self) -> AsyncIterator[Report]:
        """The one stream of a replica: new tokens and the load. At least two reports come within
        `supervision.heartbeat_timeout_s`."""

    async def submit(self, works: list[Work]) -> None: ...

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        """Stop work on these trajectories, and return all of their tokens since `Work.tokens`.

        One `Progress` for each trajectory that was released (empty if it has no new token). A trajectory that
        has finished unreported is returned with its `finish`, and is not reported again. Ids that are
        unknown, or were reported to their end, are left out. So a second release changes nothing."""

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        """Copy `version` into standby and digest it while decoding goes on, then swap between two decode
        steps. Trajectories in flight go on under `version`. With `rollout.recompute` their KV is made anew.
        A version that is served already is only digested again.
        Raises: UnknownVersionError, TornVersionError (both: pull the newest version instead),
        DigestMismatchError (fatal)."""


class Trainer(Protocol):
    async def load(self, checkpoint: str | None) -> TrainerState:
        """Initial weights (version 0) or a checkpoint directory."""

    async def step(self, batch: Batch) -> StepResult | StepRejected:
        """All optimizer steps of one batch. A repeat of the last applied batch version returns its result
        again. A batch with a loss or gradient that is not finite is rejected, and so is its repeat."""

    async def publish(self, *endpoints: Endpoint) -> None:
        """Copy the current version into slots of the root relays at `endpoints`, one for each of the
        trainer's hosts in their order. The ranks of a host copy their own blocks. Training goes on while the
        version is digested; no replica can read it before. A repeat copies nothing."""

    async def await_published(self) -> Published:
        """Wait until the version that was copied last is digested, and complete in its slot."""

    async def checkpoint(self, directory: str) -> None:
        """Begin to save everything as `directory`/`v{version:08d}`, atomically. Training goes on meanwhile.
        A second checkpoint waits for the first one."""

    async def await_saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        """Wait until the last checkpoint is complete. Old checkpoints are removed, except those of the
        versions `spared`."""

    async def export(self, directory: str) -> None:
        """Save the model and tokenizer as a Hugging Face directory."""


class Sleeper(Protocol):
    """A trainer or replica on a device that is lent in turns. A new process is asleep."""

    async def sleep(self) -> None:
        """Give back the memory of the device, and compute nothing until `wake`. A trainer first waits for
        what it publishes and saves. A replica serves version -1; its trajectories wait, and go on under the
        version of the next pull. A repeat changes nothing."""

    async def wake(self) -> None:
        """Take the memory again. A trainer is as before `sleep`, a replica needs a pull. A repeat changes
        nothing."""


class Reference(Protocol):
    """The weights that a run began with. It only computes."""

    async def load(self, digest: str) -> str:
        """Load the weights. Returns the number format of the computation. Raises: DigestMismatchError: the
        weights are not version 0, which was published with `digest`."""

    async def score(self, batch: Batch) -> list[array[float]]:
        """`TrainSequence.reference` of each sequence, in order. A repeat gives the same bits."""


class Relay(Protocol):
    async def open(self, slot_bytes: int) -> Endpoint:
        """Allocate the slots (touching every page). Returns where they are."""

    async def stage(self, version: int, digest: str) -> Staged:
        """Digest the version that the trainer wrote. If the digest is `digest`, make the version pullable.
        Raises: UnknownVersionError, DigestMismatchError."""

    async def fetch(self, version: int, digest: str, sources: list[str]) -> Staged:
        """Get `version`, published with `digest`, from the first relay of `sources` that answers, and make it
        pullable. Sources are addresses, the preferred one first. A source may still be receiving the version.

        The relay fetches only the chunks that it lacks: a repeat with other sources goes on where the last
        fetch stopped. A source with `://` is a directory or bucket; it is read when no relay has the version.
        Raises: UnknownVersionError (no source has the version, or will have it), DigestMismatchError,
        WeightsError (no source answers)."""

    async def store(self, version: int, digest: str) -> Stored:
        """Begin to write a staged version to the directory of weights. Returns at once, with the result of
        the last write: a later call returns the result of this one."""


class RewardWorker(Protocol):
    """Turns group ids into prompts and completions into scores. Any worker can serve any group."""

    async def prompts(
        self, group_ids: list[int], members: Sequence[Sequence[int]] = ()
    ) -> list[Prompt | BadPrompt]:
        """`members`: the trajectories of each group. Their episodes begin now. That of the first gives the
        prompt.
        Raises: OutOfMemory: one of these rows needs more than this worker has left."""

    async def row_ids(self, group_ids: list[int]) -> list[str]:
        """The names of their rows, without reading the rows."""

    async def forget(self, trajectory_ids: list[int]) -> dict[str, int]:
        """These trajectories need no score or answer any more, and the ledger says so. Returns how many
        episodes are `open`, and how many were closed, by cause."""

    async def answer(self, packed: PackedRequest) -> Any:
        """An environment's answer to the last turn, or its begin, as `pack_answer` makes it. None: the worker
        has not what the request leaves out (`ScoreRequest.known`), and wants all."""

    def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score | Observed]]:
        """Scores in the order of the requests, each yielded as soon as it is known.
        Raises: OutOfMemory: the next reward needs more than this worker has left."""


# ---------------------------------------------------------------- weights in a slot


class WeightsWriter(Protocol):
    """Writes versions into a relay's slots: each process of a trainer writes its own blocks. One trainer per
    relay. A reader of a slot that is being written gets TornVersionError, never mixed bytes."""

    def begin(self, version: int, manifest: Sequence[TensorSpec]) -> Filling:
        """By one process: take the oldest slot for these tensors. The slot is unreadable until `end`."""

    def fill(self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]) -> None:
        """By each process: copy its own blocks into the slot."""

    def pin(self, register: Callable[[Any], Callable[[], None]], areas: Sequence[Any] = ()) -> None:
        """As `WeightsReader.pin`, or of `areas` in the slots alone."""

    def places(
        self, filling: Filling, manifest: Sequence[TensorSpec], blocks: Sequence[NamedBuffer]
    ) -> list[Any]:
        """In place of `fill`, for a caller that copies and digests itself: the slot's bytes for each
        block."""

    def end(
        self,
        filling: Filling,
        manifest: Sequence[TensorSpec],
        written: Iterable[NamedBlock],
        elsewhere: Iterable[NamedBlock] = (),
    ) -> str:
        """By the process that began, after every process has filled: the digest of the version, made of the
        digests of its blocks. A block's digest is of the source, not of the copy. `elsewhere`: blocks that
        were written into slots of other hosts. The relay gets them from there.

        Raises: WeightsError: the blocks are not exactly the tensors, or another trainer took the slot."""

    def close(self) -> None: ...


class WeightsReader(Protocol):
    """Reads staged versions from a relay's slots, at any time, without a lock."""

    def versions(self) -> list[int]:
        """Complete versions, oldest first."""

    def pin(self, register: Callable[[Any], Callable[[], None]]) -> None:
        """Register the slots with a GPU until `close`. `register` returns a function that undoes this."""

    def read(
        self,
        version: int,
        into: Sequence[NamedBuffer],
        copy: Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None] | None = None,
    ) -> str:
        """Copy every tensor into the writable buffers of `into` and return the staged digest.

        Names, dtypes and shapes must agree exactly with the manifest. `copy` copies from the tensors in the
        slot into buffers that are not in this process's memory; it returns when all are copied.
        Raises: UnknownVersionError, TornVersionError, WeightsError (naming every tensor that is missing, in
        excess, or of another dtype or shape)."""

    def view(self, version: int) -> AbstractContextManager[tuple[str, list[NamedBuffer]]]:
        """The staged digest, and the tensors in the slot, read-only: nothing is copied.

        Raises: UnknownVersionError; at exit TornVersionError: results from these tensors are void."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- ledger


class Ledger(Protocol):
    """The durable record. Synchronous: a flush is a local transaction of milliseconds at most."""

    def recover(self) -> Recovered:
        """The state from which a run goes on. For the start of a run, because it reads every live group."""

    def checkpoint(self) -> CheckpointInfo | None:
        """The newest complete checkpoint."""

    def steps_after(self, version: int) -> list[StepRecord]:
        """Committed steps, in order. After a checkpoint's version these are the steps to repeat."""

    def group(self, group_id: int) -> Group:
        """A group of a committed step, with its members and their tokens."""

    def completions(self, version: int, group_id: int, num: int) -> list[array[int]]:
        """The tokens of `num` completions of a group that the step to `version` was trained with: those of
        the highest rewards."""

    def outcomes(self, step: StepRecord) -> list[GroupOutcome]:
        """The rewards that a committed step was trained with."""

    def admit(self, groups: Sequence[Group]) -> None: ...

    def skip(self, prompts: Sequence[BadPrompt]) -> None:
        """Record prompts that never became groups. Their group ids are not used again."""

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the present state of `trajectories`. Recorded tokens are not written again."""

    def grow(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the new tokens of `trajectories`, which are otherwise unchanged."""

    def commit_step(self, record: StepRecord) -> None:
        """Mark the step's trajectories trained, durably, together with its record."""

    def commit_checkpoint(self, info: CheckpointInfo) -> None: ...

    def version_records(self, version: int) -> list[VersionRecord]:
        """The records of `version`, the first one first. A repeat that was rounded differently adds one."""

    def record_version(self, record: VersionRecord) -> None: ...

    def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations, in the order of their versions."""

    def evaluated(self, record: EvaluationRecord, attempts: Sequence[EvaluationAttempt]) -> None:
        """Record one complete evaluation, durably. Each (name, version) once. Raises LedgerError."""

    def accounting(self) -> Accounting: ...

    def flush(self) -> Accounting:
        """Make everything so far durable, except the newest tokens of some trajectories that only grew: a
        later flush writes them. Raises LedgerError if the accounts do not close."""

    def close(self) -> None: ...


class Recovered(Protocol):
    """The state of a run in the ledger."""

    next_group_id: int
    groups: list[Group]  # live groups, by id; queued and leased members have their partial tokens
    version: int  # after the last committed step
    reached: int  # the highest id of a group that was ever trained; -1: none was
    quarantined: list[str]  # ids of rows that are never to be drawn again
