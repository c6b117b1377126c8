"""The engine protocol on a running server, and a version as a file that servers load, in a directory that
both hosts see under one path.

A request belongs to one version. The engine sends a request after that version was loaded and proved, and the
request ends before the next version is loaded. So each of its tokens names that version. A load aborts all
requests. Each trajectory goes on as a new request whose prompt ends with the tokens so far, and the server
computes keys and values with the new weights.

The server names its weights by the label of the load. The end of a request names the labels of the weights
that sampled it; SGLang names one with every token. An unknown label means that somebody else loads weights.

The first replica writes the file, and the other replicas find the file there. A replica holds a shared lock
while it needs the file; the lock ends with the process. Files of older versions without a lock are removed.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from millrace.core.digest import NamedBuffer, digest_buffers, kind_of
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WeightsError, WorkerError, writing
from millrace.core.protocols import WeightsReader
from millrace.core.types import ReplicaLoad
from millrace.devices.large_memory import each
from millrace.engines.server.client import StreamedTokens, Streams
from millrace.engines.server.server_dialect import Dialect, Sampled, Token
from millrace.engines.vllm.proof import Proof
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake, Queues
from millrace.rollout.replica import Sleepless

STEP_S = 0.5  # a step waits for a token of each request that decodes, and a command waits for the step
QUIET_S = 10.0  # after so long without a token the engine checks that the server lives
ABORT_S = 5.0  # for requests to end after a pause


class _Staged(NamedTuple):
    version: int
    directory: Path
    digest: str
    expected: torch.Tensor


class ServerEngine(Sleepless, Queues):
    """See `rollout.protocol.Engine`. A server has one such engine at a time."""

    def __init__(
        self,
        server: Dialect,
        streams: Streams,
        handover: Handover,
        intake: Intake,
        proof: Proof,
        *,
        slots: int,
        kv_capacity_tokens: int,
        computes: str,
    ) -> None:
        super().__init__(intake)
        self._server, self._streams, self._handover, self._proof = server, streams, handover, proof
        self._slots, self._capacity, self.computes = slots, kv_capacity_tokens, computes
        self._staged: _Staged | None = None
        self._served: _Staged | None = None
        self._running: dict[int, Continuation] = {}  # by request
        self._requests = count()
        self._incarnation, self._label = os.urandom(4).hex(), ""
        self._heard_s = time.monotonic()
        server.pause()  # requests of an earlier incarnation end
        server.resume()

    def close(self) -> None:
        self._streams.close()
        self._handover.close()
        self._server.close()

    # ------------------------------------------------------------ work

    def load(self) -> ReplicaLoad:
        """The engine counts itself: the server's own queue is empty unless its cache is full."""
        return self._counted_load(self._capacity)

    # ------------------------------------------------------------ weights

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        """Raises also StorageError: the file cannot be written."""
        with reader.view(version) as (staged, buffers):
            digest = digest_buffers(buffers, kind_of(staged), each=each)
            expected = self._proof.expected(buffers)
        self._staged = _Staged(version, self._handover.hold(version, staged, reader), digest, expected)
        return staged, digest

    def swap(self, version: int) -> None:
        """Raises also WorkerError: the server is gone, or could not load. Then it may have half of the
        version."""
        staged = self._staged
        assert staged is not None and staged.version == version, (version, staged)
        self._server.pause()
        self._streams.end(self._running, after_s=ABORT_S)
        self._take_in(self._streams.take(), paused=True)
        self._waiting.extendleft(reversed(self._running.values()))
        self._running.clear()
        self.version, self._served = -1, None
        self._label = f"{version} {staged.digest} {self._incarnation}"
        self._server.load(staged.directory, self._label)
        self._server.resume()
        self._prove(staged)
        self.version, self._served, self._steps_since_swap = version, staged, 0

    def digest(self) -> str:
        """The digest of the loaded file, after a proof that the server computes with that file."""
        assert self._served is not None, "nothing is served"
        self._prove(self._served)
        return self._served.digest

    def _prove(self, staged: _Staged) -> None:
        """Weights that give NaN are not proved, because a server cannot answer. The next step reports
        them."""
        if not staged.expected.isfinite().all():
            return
        logprobs = self._server.logprobs(self._proof.tokens)
        distance = self._proof.distance(staged.expected, logprobs)
        if distance > 1:
            self.version = -1
            raise DigestMismatchError(
                f"server {self._server.url} was given version {staged.version} (digest {staged.digest}) and "
                f"computes another: its log-probs of {len(logprobs)} fixed tokens are {distance:.3g} times "
                "further from those of the published weights than rounding explains.\n  Does another run use "
                "this server, or has it another model?"
            )

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        """Raises also WorkerError: the server is gone, or ended a request that should go on."""
        if not self.has_work:
            return
        self._steps_since_swap += 1
        self._hand_over()
        decoding = [key for key, continuation in self._running.items() if continuation.has_sampled]
        arrived = self._streams.take(decoding or self._running, wait_s=STEP_S)
        now_s = time.monotonic()
        if arrived:
            self._heard_s = now_s
        elif now_s > self._heard_s + QUIET_S:
            self._server.check_alive()
            self._heard_s = now_s
        self._take_in(arrived)

    def _hand_over(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            continuation = self._waiting.popleft()
            key = next(self._requests)
            self._running[key] = continuation
            self._prefilled += len(continuation.tokens)
            self._streams.send(key, self._server.request(continuation, self._label))

    def _take_in(self, arrived: Iterable[StreamedTokens], *, paused: bool = False) -> None:
        for streamed in arrived:
            part = streamed.part
            self._check_labels(part)
            continuation = self._running.get(streamed.key)
            if continuation is None:
                continue  # the trajectory has ended by the engine's own count
            trajectory_id = continuation.work.trajectory_id
            if streamed.error is not None:
                raise WorkerError(f"server {self._server.url}, trajectory {trajectory_id}: {streamed.error}")
            for token in part.tokens:
                if continuation.finish is None:
                    self._append(streamed.key, token)
            if continuation.finish is not None:
                self._finished[trajectory_id] = self._running.pop(streamed.key)
                if part.finish_reason is None:
                    self._streams.end([streamed.key])
            elif part.finish_reason is not None and not (paused and part.finish_reason == "abort"):
                raise WorkerError(
                    f"server {self._server.url} ended trajectory {trajectory_id} ({part.finish_reason}), "
                    "which should have gone on: does another run, or an earlier replica, use this server?"
                )

    def _append(self, key: int, token: Token) -> None:
        continuation = self._running[key]
        if math.isnan(token.logprob):
            del self._running[key]
            self._streams.end([key])
            raise WeightsError(
                f"version {self.version} gives log-probs that are not finite for trajectories "
                f"[{continuation.work.trajectory_id}]. The weights are broken: look at the gradient norm of "
                "the last steps, and go back to an earlier checkpoint"
            )
        continuation.append(token.token_id, token.logprob, self.version)
        self._generated += 1

    def _check_labels(self, part: Sampled) -> None:
        unknown = [label for label in part.labels if label != self._label]
        if unknown:
            self.version = -1
            raise DigestMismatchError(
                f"server {self._server.url} sampled with weights that are not this run's "
                f"({unknown}, not {self._label}): somebody else loads weights into it. What was sampled "
                "there is suspect; give each run servers of its own"
            )

    def _stop(self, continuation: Continuation) -> Continuation:
        """Tokens of `continuation` that have arrived count, even its end."""
        key = next(key for key, running in self._running.items() if running is continuation)
        self._streams.end([key])
        self._take_in(self._streams.take())
        self._finished.pop(continuation.work.trajectory_id, None)
        self._running.pop(key, None)
        return continuation

    def _under_way(self) -> Collection[Continuation]:
        return self._running.values()


# ---------------------------------------------------------------- a version as a file


FILE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Handover:
    """One replica's view of `directory`. A replica needs one version at a time.

    `with_head`: the server has a head of its own, although the model's head is tied to its embedding.
    """

    def __init__(self, directory: Path, *, with_head: bool) -> None:
        self._directory, self._with_head = directory.absolute(), with_head
        self._locked: int | None = None  # a file descriptor
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)

    def hold(self, version: int, digest: str, reader: WeightsReader) -> Path:
        """A directory with `version` in it. The directory stays until the next call, or `close`.

        Raises: UnknownVersionError, TornVersionError; StorageError."""
        own = "-own-head" if self._with_head else ""
        place = self._directory / f"v{version:08d}-{digest}{own}"
        with writing(place), self._alone():
            if not (place / FILE).exists():
                self._write(place, version, digest, reader)
            locked = os.open(place / FILE, os.O_RDONLY)
            fcntl.flock(locked, fcntl.LOCK_SH)
            self._let_go()
            self._locked = locked
            self._sweep(older_than=place.name)
        return place

    def close(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
        self._locked = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self._directory / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, place: Path, version: int, digest: str, reader: WeightsReader) -> None:
        """The directory gets its name when it is complete. A torn directory stays a draft, which the next
        writer replaces."""
        draft = self._directory / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        with reader.view(version) as (staged, buffers):
            if staged != digest:
                raise UnknownVersionError(f"version {version} was staged anew: {staged}, not {digest}")
            write_safetensors(draft / FILE, with_head(buffers) if self._with_head else buffers)
        draft.rename(place)

    def _sweep(self, older_than: str) -> None:
        for place in sorted(self._directory.glob("v*-*")):
            if place.name >= older_than:
                return
            with suppress(BlockingIOError, FileNotFoundError), open(place / FILE, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (place / FILE).unlink()
            with suppress(OSError):  # the directory is in use, here or on another host
                place.rmdir()


def with_head(buffers: Sequence[NamedBuffer]) -> list[NamedBuffer]:
    """`buffers` with the embedding as the head too, if they have no head.

    Raises: WeightsError: there is no embedding, or there are several."""
    if any(buffer.name == HEAD for buffer in buffers):
        return list(buffers)
    embeddings = [buffer for buffer in buffers if buffer.name.endswith(EMBEDDING)]
    if len(embeddings) != 1:
        raise WeightsError(
            f"the server has a head of its own (`tie_word_embeddings` false), the weights have none, and "
            f"{len(embeddings)} of them are called *{EMBEDDING}"
        )
    return [*buffers, msgspec.structs.replace(embeddings[0], name=HEAD)]


def write_safetensors(path: Path, buffers: Sequence[NamedBuffer]) -> None:
    """Write a file of the format at github.com/huggingface/safetensors, straight from the buffers."""
    header, offset = {}, 0
    for buffer in buffers:
        end = offset + memoryview(buffer.data).nbytes
        header[buffer.name] = {
            "dtype": _DTYPES[buffer.dtype],
            "shape": buffer.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for buffer in buffers:
            file.write(buffer.data)
