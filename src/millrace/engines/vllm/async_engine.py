"""The engine protocol on vLLM's `AsyncLLM`: vLLM generates in a process of its own, beside the replica, and
its frontend has a thread of its own.

Steps of vLLM are not steps of this engine. `step` waits for tokens and takes all that have come. A load
pauses vLLM and keeps its requests (`mode="keep"`). All tokens that were sampled before the pause are taken
first. So each token names the version that sampled it. The pause empties the cache of keys and values, and
running requests compute theirs again under the new version. Without `recompute` they keep theirs.

A released trajectory is taken out alone, with the tokens that have come. Other requests go on.

`AsyncLLM` is the half of vLLM in this process: it sends requests to a process of vLLM, which generates all
the time, and takes that process's tokens. The engine's thread calls the methods here. Each method waits for
an answer of the loop.

Each request has a collector, into which vLLM puts tokens. `collect` empties them. When `pause` returns, every
token that was sampled before the pause is in its collector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing.process import BaseProcess
from threading import Event, Thread
from typing import Any, TypeVar

from millrace.core.errors import DigestMismatchError, UnknownVersionError, WorkerError
from millrace.core.protocols import WeightsReader
from millrace.core.types import ReplicaLoad
from millrace.devices.served_weights import Base
from millrace.engines.vllm.extension import packed, unpacked
from millrace.engines.vllm.mode import StagedWeights, VllmMode, name_of
from millrace.engines.vllm.processes.rank_end import RankEnd, end_of
from millrace.engines.vllm.proof import Proof
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake
from millrace.rollout.protocol import NativeAdapter

T = TypeVar("T")

STEP_S = 0.5  # a step waits for so long
SILENT_S = 600.0  # vLLM computes the longest prompts in less


class AsyncVllmEngine(VllmMode):
    """See `rollout.protocol.Engine`."""

    def __init__(
        self, frontend: Frontend, intake: Intake, proof: Proof, *, recompute: bool, **settings: Any
    ) -> None:
        super().__init__(intake, proof, **settings)
        self._frontend, self._recompute = frontend, recompute
        cache = frontend.llm.vllm_config.cache_config
        self._capacity = cache.num_gpu_blocks * cache.block_size
        self._heard_s = time.monotonic()
        self._begun: dict[int, int] = {}  # tokens that were sampled before the request, by trajectory

    # ------------------------------------------------------------ work

    def load(self) -> ReplicaLoad:
        """By this engine's own count."""
        self._frontend.check()
        return self._drafts.added(self._counted_load(self._capacity))

    def step(self) -> None:
        """Raises also WorkerError: vLLM's process has ended, or is silent."""
        if not self.has_work:
            return
        self._frontend.add([self._request(continuation) for continuation in self._next_works()])
        outputs = self._frontend.collect(STEP_S)
        self._check_silence(heard=bool(outputs))
        self._note(outputs)

    def _check_silence(self, *, heard: bool) -> None:
        now_s = time.monotonic()
        if heard:
            self._heard_s = now_s
        elif now_s > self._heard_s + SILENT_S:
            self._frontend.check()
            raise WorkerError(f"vLLM's process has given no token of {len(self._running)} for {SILENT_S:g} s")

    def close(self) -> None:
        """End vLLM's processes."""
        self._frontend.close()

    # ------------------------------------------------------------ of this mode

    def _load(self, staged: StagedWeights) -> None:
        self._note(self._frontend.pause(clear_cache=self._recompute))
        if not self._recompute:
            for continuation in [c for c in reversed(self._running.values()) if not c.has_sampled]:
                self._waiting.appendleft(self._end(continuation))
        before, self.version = self.version, -1
        errors = self._frontend.load(staged.reader, staged.version, staged.digest)
        try:
            self._loaded(staged, before, errors)
        except UnknownVersionError:  # no rank has changed
            self._resume()
            raise
        self._resume()

    def _pause(self) -> None:
        self._note(self._frontend.pause(clear_cache=True))

    def _release_memory(self) -> None:
        self._frontend.release_memory()

    def _take_memory(self) -> None:
        self._frontend.take_memory()
        self._resume()

    def _resume(self) -> None:
        self._frontend.resume()
        self._heard_s = time.monotonic()

    def logprobs(self) -> tuple[list[float], list[Any]]:
        """Outputs of other requests stay in their collectors meanwhile."""
        return self._proof_logprobs(self._frontend.finish(self._proof_request())), []

    def _abort(self, name: str) -> None:
        self._frontend.abort(name)

    def _request(self, continuation: Continuation) -> dict[str, Any]:
        before = continuation.completion_length - len(continuation.work.tokens)
        self._begun[continuation.work.trajectory_id] = before
        return super()._request(continuation)

    def _append(self, continuation: Continuation, output: Any) -> None:
        before = self._begun[continuation.work.trajectory_id]
        super()._append(continuation, output)
        spans = getattr(output.outputs[0], "weight_versions", None)  # vLLM tells them at the end of a request
        if spans is None:
            return
        ours = [(str(version), count) for version, count in continuation.sampled().columns[before:].runs]
        theirs, left = list[tuple[str, int]](), sum(count for _, count in ours)
        for span in spans:  # vLLM may have gone on beyond an end that it does not know
            if count := min(span.end - span.start, left):
                theirs.append((span.version, count))
            left -= count
        if theirs != ours:
            self.version = -1
            raise DigestMismatchError(
                f"vLLM says that {name_of(continuation)} was sampled by versions {theirs}, and tokens "
                f"arrived under {ours} (version, tokens). Nobody knows which weights sampled: the run "
                "must stop"
            )

    def _end(self, continuation: Continuation, *, ended: bool = False) -> Continuation:
        if ended:
            self._frontend.forget(name_of(continuation))
        del self._begun[continuation.work.trajectory_id]
        return super()._end(continuation, ended=ended)

    def _stop(self, continuation: Continuation) -> Continuation:
        """Tokens of `continuation` that have come count, even its end."""
        trajectory_id = continuation.work.trajectory_id
        output = self._frontend.take(name_of(continuation)) if self.version >= 0 else None
        if output is not None:
            self._note([output])
        if self._finished.pop(trajectory_id, None) is None:
            self._end(continuation)
        return continuation


# ---------------------------------------------------------------- the thread of `AsyncLLM`


CLOSE_S = 30.0
SETTLE_S = 1.0
LOOK_S = 1.0  # between two looks whether vLLM lives
ENDED_S = 5.0


class Arrivals:
    """Tells when the outputs that vLLM's process sent are in their collectors.

    vLLM's output handler asks `client` for the next outputs when it has dealt with the last ones."""

    def __init__(self, client: Any) -> None:
        self._queue, self._next = client.outputs_queue, client.get_output_async
        self._idle, self._ended, self._arrived = True, False, asyncio.Event()
        client.get_output_async = self._get

    async def _get(self) -> Any:
        self._idle = True
        self._arrived.set()
        try:
            outputs = await self._next()
        except BaseException:
            self._ended = True
            self._arrived.set()
            raise
        self._idle = False
        return outputs

    async def wait(self, wait_s: float) -> None:
        """Wait until outputs have arrived since the last call, for `wait_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()
        self._arrived.clear()

    async def settle(self) -> None:
        """Wait until the outputs that have arrived by now are in their collectors."""
        while not (self._ended or (self._idle and self._queue.empty())):
            await self.wait(SETTLE_S)


class Frontend:
    """`make` makes the `AsyncLLM`; it is called on the thread of the loop."""

    def __init__(self, make: Callable[[], Any], rank_end: RankEnd) -> None:
        self._rank_end = rank_end
        self._ready, self._opened = Event(), Future[Any]()
        self._collectors: dict[str, Any] = {}
        self._thread = Thread(target=lambda: asyncio.run(self._serve(make)), name="vllm", daemon=True)
        self._thread.start()
        self.llm = self._opened.result()

    # ------------------------------------------------------------ requests

    def add(self, requests: Sequence[dict[str, Any]]) -> None:
        """Begin requests: the arguments of `AsyncLLM.add_request`. Names must be new or ended."""
        if requests:
            self._do(self._add(requests))

    def collect(self, wait_s: float) -> list[Any]:
        """Outputs that have arrived since the last call. Waits for some for `wait_s` at most."""
        return self._do(self._collect(wait_s))

    def take(self, name: str) -> Any:
        """Outputs of request `name` that have arrived since the last call. None: there are none."""
        return self._do(self._take(name))

    def finish(self, request: dict[str, Any]) -> Any:
        """The output of a request of one token, which is begun here."""
        return self._do(self._finish(request))

    def abort(self, name: str) -> None:
        self._do(self._abort(name))

    def forget(self, name: str) -> None:
        """Forget request `name`, which has ended."""
        self._collectors.pop(name, None)

    # ------------------------------------------------------------ weights

    def pause(self, *, clear_cache: bool) -> list[Any]:
        """Stop after the running step. Requests stay, and go on with `resume`. `clear_cache`: their keys and
        values are computed again then. Returns: all outputs that were not collected."""
        return self._do(self._pause(clear_cache))

    def load(self, reader: WeightsReader, version: int, digest: str) -> list[list[Exception]]:
        """`loading.load_version` in every rank. Returns: the errors of each."""
        return self._do(self._load(packed(reader), version, digest))

    def load_base(self, base: Base, adapter: NativeAdapter) -> list[list[Exception]]:
        """`loading.load_base` in every rank. Returns: the errors of each."""
        answers = self._do(self.llm.collective_rpc("load_base", args=(packed((base, adapter)),)))
        return [unpacked(answer) for answer in answers]

    def repair_sampler(self) -> None:
        """`drafts.repair` in every rank."""
        self._do(self.llm.collective_rpc("repair_sampler"))

    def release_memory(self) -> None:
        """`memory.release` in every rank. vLLM is paused, and has no request."""
        self._do(self.llm.collective_rpc("release_memory"))

    def take_memory(self) -> None:
        """`memory.take_again` in every rank."""
        self._do(self.llm.collective_rpc("take_memory"))

    def resume(self) -> None:
        self._do(self.llm.resume_generation())

    # ------------------------------------------------------------ ends

    def check(self) -> None:
        """Raises: WorkerError: a process of vLLM has ended; the message says which, and how."""
        if end := self._end():
            raise WorkerError(end)

    def close(self) -> None:
        """A second call changes nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            process = self._process
            self._thread.join(CLOSE_S)
            process.join(ENDED_S)  # vLLM kills a process that does not end by itself, and does not reap it
            self._rank_end.close()
            del self.llm, self._opened, self._arrivals  # what is left of vLLM goes with them

    @property
    def _process(self) -> BaseProcess:
        process: BaseProcess
        (process,) = self.llm.engine_core.resources.engine_manager.processes
        return process

    def _end(self) -> str:
        """Which process of vLLM has ended, and how. Empty: none has."""
        if not self.llm.errored:
            return self._rank_end.line()
        core = end_of(self._process)
        return self._rank_end.line() or core

    # ------------------------------------------------------------ on the loop

    async def _serve(self, make: Callable[[], Any]) -> None:
        """The owner of every task; ends with `close`."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            llm = make()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._arrivals = Arrivals(llm.engine_core)
        async with asyncio.TaskGroup() as self._group:
            self._opened.set_result(llm)
            await self._closing.wait()
        llm.shutdown()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises: WorkerError: a process of vLLM has ended."""
        answered: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, work, answered)
        while not wait([answered], LOOK_S).done:
            self.check()  # a call of a process that is killed has no answer
        try:
            return answered.result()
        except Exception as error:
            if end := self._end():
                raise WorkerError(end) from error
            raise

    def _begin(self, work: Coroutine[Any, Any, T], answered: Future[T]) -> None:
        self._group.create_task(self._answer(work, answered))

    @staticmethod
    async def _answer(work: Coroutine[Any, Any, T], answered: Future[T]) -> None:
        try:
            answered.set_result(await work)
        except Exception as error:
            answered.set_exception(error)

    async def _add(self, requests: Sequence[dict[str, Any]]) -> None:
        for request in requests:
            self._collectors[request["request_id"]] = await self.llm.add_request(**request)

    async def _collect(self, wait_s: float) -> list[Any]:
        await self._arrivals.wait(wait_s)
        return self._collected()

    def _collected(self) -> list[Any]:
        outputs = [collector.get_nowait() for collector in self._collectors.values()]
        return [output for output in outputs if output is not None]

    async def _take(self, name: str) -> Any:
        return self._collectors[name].get_nowait()

    async def _finish(self, request: dict[str, Any]) -> Any:
        collector = await self.llm.add_request(**request)
        while not (output := await collector.get()).finished:
            pass
        return output

    async def _abort(self, name: str) -> None:
        self._collectors.pop(name, None)
        await self.llm.abort(name)

    async def _pause(self, clear_cache: bool) -> list[Any]:
        await self.llm.pause_generation(mode="keep", clear_cache=clear_cache)
        await self._arrivals.settle()
        return self._collected()

    async def _load(self, reader: bytes, version: int, digest: str) -> list[list[Exception]]:
        answers = await self.llm.collective_rpc("load_published", args=(reader, version, digest))
        errors: list[list[Exception]] = [unpacked(answer) for answer in answers]
        if not any(errors) and hasattr(self.llm, "update_weight_version"):  # from vLLM 0.31 on
            await self.llm.update_weight_version(str(version))
        return errors
