"""The engine protocol on vLLM's `LLMEngine` in this process, one step at a time.

Versions never mix. Tokens come from `step` alone, and no load happens during a step. A load preempts every
request, so all keys and values are computed again. Without `recompute`, requests that have tokens keep their
keys and values.

If the model is divided among devices, vLLM has a process for each device: see `processes.ranks`. The
scheduler stays in this process, so all of the above holds for ranks too.
"""

from __future__ import annotations

from typing import Any

from millrace.core.types import ReplicaLoad
from millrace.engines.vllm import loading
from millrace.engines.vllm.loading import load_version
from millrace.engines.vllm.mode import PROOF, StagedWeights, VllmMode
from millrace.engines.vllm.processes.rank_end import RankEnd
from millrace.engines.vllm.proof import Proof
from millrace.rollout.intake import Intake


class VllmEngine(VllmMode):
    """See `rollout.protocol.Engine`. `llm` is an `LLMEngine` whose core is in this process."""

    def __init__(
        self, llm: Any, rank_end: RankEnd, intake: Intake, proof: Proof, *, recompute: bool, **settings: Any
    ) -> None:
        super().__init__(intake, proof, **settings)
        self._llm, self._rank_end, self._recompute = llm, rank_end, recompute
        cache = llm.vllm_config.cache_config
        self._capacity = cache.num_gpu_blocks * cache.block_size
        self._scheduler = llm.engine_core.engine_core.scheduler

    def load(self) -> ReplicaLoad:
        """Queues and cache by vLLM's own count."""
        self._rank_end.check()
        running, waiting = self._scheduler.get_request_counts()
        return ReplicaLoad(
            version=self.version,
            running=running,
            waiting=waiting + len(self._waiting),
            kv_used_tokens=round(self._scheduler.kv_cache_manager.usage * self._capacity),
            kv_capacity_tokens=self._capacity,
            steps_since_swap=self._steps_since_swap,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            drafted_tokens=self._drafts.drafted,
            accepted_tokens=self._drafts.accepted,
        )

    def step(self) -> None:
        if self.has_work:
            for continuation in self._next_works():
                self._llm.add_request(**self._request(continuation))
            with self._rank_end.answering():
                outputs = self._llm.step()
            self._note(outputs)

    def close(self) -> None:
        """End vLLM. Other engines with vLLM in this process end too, because they share its process
        groups."""
        self._llm.engine_core.shutdown()
        self._rank_end.close()

    # ------------------------------------------------------------ of this mode

    def _load(self, staged: StagedWeights) -> None:
        before, self.version = self.version, -1
        with self._rank_end.answering():
            errors = self._llm.collective_rpc(
                load_version, args=(staged.reader, staged.version, staged.digest)
            )
        self._loaded(staged, before, errors)
        if not self._recompute:
            for continuation in [c for c in reversed(self._running.values()) if not c.has_sampled]:
                self._waiting.appendleft(self._stop(continuation))
        self._llm.reset_prefix_cache(reset_running_requests=self._recompute)

    def logprobs(self) -> tuple[list[float], list[Any]]:
        self._llm.add_request(**self._proof_request())
        outputs: list[Any] = []
        while not (proofs := [output for output in outputs if output.request_id == PROOF]):
            with self._rank_end.answering():
                outputs += self._llm.step()
        return self._proof_logprobs(proofs[0]), outputs

    def _release_memory(self) -> None:
        with self._rank_end.answering():
            self._llm.collective_rpc(loading.release)

    def _take_memory(self) -> None:
        with self._rank_end.answering():
            self._llm.collective_rpc(loading.take_again)

    def _abort(self, name: str) -> None:
        self._llm.abort_request([name])
