"""The engine protocol on vLLM's `AsyncLLM`: vLLM generates in a process of its own, beside the replica.

Steps of vLLM are not steps of this engine. `step` waits for tokens and takes all that have come. A load
pauses vLLM and keeps its requests (`mode="keep"`). All tokens that were sampled before the pause are taken
first. So each token names the version that sampled it. The pause empties the cache of keys and values, and
running requests compute theirs again under the new version. Without `recompute` they keep theirs.

A released trajectory is taken out alone, with the tokens that have come. Other requests go on.
"""

from __future__ import annotations

import time
from typing import Any

from millrace.core.errors import DigestMismatchError, UnknownVersionError, WorkerError
from millrace.core.types import ReplicaLoad
from millrace.engines.vllm.frontend import Frontend
from millrace.engines.vllm.mode import StagedWeights, VllmMode, name_of
from millrace.engines.vllm.proof import Proof
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake

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
