"""The engine protocol on vLLM's `LLMEngine`, one step at a time.

Stop strings, end tokens, budgets and leases are those of every engine: a `Continuation` finds its own end,
and vLLM only samples tokens. vLLM has at most `slots` requests; other work waits here. A trajectory that goes
on from partial tokens is a request whose prompt ends with them.

Versions never mix. Tokens come from `step` alone, and no load happens during a step. A load preempts every
request, so all keys and values are computed again. Without `recompute`, requests that have tokens keep their
keys and values. The cache of prefixes is salted with the version, so no other request finds old keys.

If the model is divided among devices, vLLM has a process for each device: see `ranks`. The scheduler stays in
this process, so all of the above holds for ranks too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from millrace.core.completion.top_logprobs import Row
from millrace.core.digest import digest_buffers, kind_of
from millrace.core.errors import (
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    WorkerError,
)
from millrace.core.protocols import WeightsReader
from millrace.core.types import ReplicaLoad
from millrace.devices.parallel import each
from millrace.engines.vllm.loading import load_version
from millrace.engines.vllm.proof import Proof
from millrace.engines.vllm.ranks import EngineRanks
from millrace.engines.vllm.sampling_params import sampling_arguments
from millrace.rollout.colocated.sleepless import Sleepless
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake
from millrace.rollout.queues import Queues

_PROOF = "proof"  # the name of that request; every other request is called TRAJECTORY.LEASE


class _Staged(NamedTuple):
    version: int
    reader: WeightsReader
    digest: str
    expected: torch.Tensor


class VllmEngine(Sleepless, Queues):
    """See `rollout.protocol.Engine`. `llm` is an `LLMEngine` whose core is in this process."""

    def __init__(
        self, llm: Any, intake: Intake, proof: Proof, *, slots: int, recompute: bool, computes: str
    ) -> None:
        super().__init__(intake)
        self._llm, self._proof, self.computes = llm, proof, computes
        self._slots, self._recompute = slots, recompute
        self._staged: _Staged | None = None
        self._served: _Staged | None = None
        self._running: dict[int, Continuation] = {}  # by trajectory
        self._generated = self._prefilled = self._steps_since_swap = 0
        cache = llm.vllm_config.cache_config
        self._capacity = cache.num_gpu_blocks * cache.block_size
        core = llm.engine_core.engine_core
        self._scheduler, self._ranks = core.scheduler, EngineRanks(core.model_executor)

    # ------------------------------------------------------------ work

    def load(self) -> ReplicaLoad:
        """Queues and cache by vLLM's own count."""
        self._ranks.check()
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
        )

    # ------------------------------------------------------------ weights

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        """Digest the bytes in the relay's memory, and compute the proof's log-probs. Nothing is copied:
        `swap` reads the bytes once more."""
        with reader.view(version) as (staged, buffers):
            digest = digest_buffers(buffers, kind_of(staged), each=each)
            expected = self._proof.expected(buffers)
        self._staged = _Staged(version, reader, digest, expected)
        return staged, digest

    def swap(self, version: int) -> None:
        """Raises also UnknownVersionError: the version was overwritten after `stage`; the earlier version is
        served on. WorkerError: the version was overwritten during the load; the model is of no version, and
        this process must start anew."""
        staged = self._staged
        assert staged is not None and staged.version == version, (version, staged)
        self._load_version(staged)
        self._forget_cache()
        self.version, self._served, self._steps_since_swap = version, staged, 0
        self._prove(staged)

    def _load_version(self, staged: _Staged) -> None:
        """Load in every rank. A failure leaves a model of no version, unless no rank has changed."""
        before, self.version = self.version, -1
        with self._ranks.answering():
            outcomes = self._llm.collective_rpc(
                load_version, args=(staged.reader, staged.version, staged.digest)
            )
        failures = [error for outcome in outcomes for error in outcome]
        if not failures:
            return
        unchanged = [error for error in failures if isinstance(error, UnknownVersionError)]
        if len(unchanged) == len(outcomes):
            self.version = before
        elif all(isinstance(error, (UnknownVersionError, TornVersionError)) for error in failures):
            raise WorkerError(
                f"vLLM has half of version {staged.version}, and must start anew: {failures[0]}"
            ) from failures[0]
        raise failures[0]

    def digest(self) -> str:
        """The digest of the loaded bytes, after a proof that vLLM computes with them."""
        assert self._served is not None, "nothing is served"
        self._prove(self._served)
        return self._served.digest

    def _forget_cache(self) -> None:
        if not self._recompute:
            for continuation in [c for c in reversed(self._running.values()) if not c.has_sampled]:
                self._waiting.appendleft(self._stop(continuation))
        self._llm.reset_prefix_cache(reset_running_requests=self._recompute)

    def logprobs(self) -> tuple[list[float], list[Any]]:
        """Log-probs of the proof's tokens but the first, and all outputs of the steps that this took."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._llm.add_request(_PROOF, {"prompt_token_ids": self._proof.tokens}, params, priority=0)
        outputs: list[Any] = []
        while not (proofs := [output for output in outputs if output.request_id == _PROOF]):
            with self._ranks.answering():
                outputs += self._llm.step()
        pairs = zip(proofs[0].prompt_logprobs[1:], self._proof.tokens[1:], strict=True)
        return [position[token].logprob for position, token in pairs], outputs

    def _prove(self, staged: _Staged) -> None:
        """Tokens of other requests in these steps count only if the proof holds."""
        logprobs, outputs = self.logprobs()
        distance = self._proof.distance(staged.expected, logprobs)
        if distance > 1:
            self.version = -1
            raise DigestMismatchError(
                f"vLLM was given version {staged.version} (digest {staged.digest}) and computes another: its "
                f"log-probs of {len(logprobs)} fixed tokens are {distance:.3g} times further from those of "
                "the published weights than rounding explains. Nothing was sampled under it; the run must "
                "stop"
            )
        self._note(outputs)

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        if self.has_work:
            self._hand_over()
            with self._ranks.answering():
                outputs = self._llm.step()
            self._note(outputs)

    def _hand_over(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            continuation = self._waiting.popleft()
            self._running[continuation.work.trajectory_id] = continuation
            prompt = {"prompt_token_ids": list(continuation.tokens), "cache_salt": f"version {self.version}"}
            self._llm.add_request(_name(continuation), prompt, _params(continuation), priority=1)

    def _note(self, outputs: Iterable[Any]) -> None:
        self._steps_since_swap += 1
        named = ((_trajectory(output.request_id), output) for output in outputs)
        sampled = [
            (trajectory_id, output) for trajectory_id, output in named if trajectory_id in self._running
        ]
        bad = [i for i, output in sampled if not math.isfinite(output.outputs[0].cumulative_logprob)]
        if bad:
            raise WeightsError(
                f"version {self.version} gives log-probs that are not finite for trajectories {bad[:8]} "
                f"({len(bad)} of {len(sampled)} decoded). The weights are broken: look at the gradient norm "
                "of the last steps, and go back to an earlier checkpoint"
            )
        for trajectory_id, output in sampled:
            if trajectory_id in self._running:  # it may have ended in an earlier step of `outputs`
                self._append(self._running[trajectory_id], output)

    def _append(self, continuation: Continuation, output: Any) -> None:
        (completion,) = output.outputs
        if not continuation.has_sampled:
            self._prefilled += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
            top_logprobs = _top_logprobs(logprobs, continuation.work.sampling.logprobs)
            continuation.append(token, logprobs[token].logprob, self.version, top_logprobs)
            self._generated += 1
        if continuation.finish is not None:
            self._finished[continuation.work.trajectory_id] = self._stop(continuation, ended=output.finished)
        elif output.finished:
            raise WorkerError(
                f"vLLM ended {_name(continuation)} ({completion.finish_reason}): it should have gone on"
            )

    def _stop(self, continuation: Continuation, *, ended: bool = False) -> Continuation:
        """Take the request away from vLLM."""
        if not ended:
            self._llm.abort_request([_name(continuation)])
        return self._running.pop(continuation.work.trajectory_id)

    def close(self) -> None:
        """End vLLM. Other engines with vLLM in this process end too, because they share its process
        groups."""
        self._llm.engine_core.shutdown()

    def _under_way(self) -> Collection[Continuation]:
        return self._running.values()


def _name(continuation: Continuation) -> str:
    return f"{continuation.work.trajectory_id}.{continuation.work.lease}"


def _trajectory(name: str) -> int:
    """-1: the proof."""
    return -1 if name == _PROOF else int(name.partition(".")[0])


def _top_logprobs(logprobs: dict[int, Any], num: int) -> Row | None:
    """The row of one position. `logprobs` has the sampled token too, at whatever rank."""
    if not num:
        return None
    tokens = sorted(logprobs, key=lambda token: logprobs[token].rank)[:num]
    return tokens, [logprobs[token].logprob for token in tokens]


def _params(continuation: Continuation) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**sampling_arguments(continuation), output_kind=RequestOutputKind.DELTA)
