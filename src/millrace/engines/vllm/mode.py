"""The engine protocol on vLLM: the part that both modes share, which is tokens into continuations and the
proof, and the engine on vLLM's `LLMEngine` in this process, one step at a time.

Stop strings, end tokens, budgets and leases are those of every engine: a `Continuation` finds its own end,
and vLLM only samples tokens. vLLM has at most `slots` requests; other work waits here. A trajectory that goes
on from partial tokens is a request whose prompt ends with them.

In this process versions never mix. Tokens come from `step` alone, and no load happens during a step. A load
preempts every request, so all keys and values are computed again. Without `recompute`, requests that have
tokens keep their keys and values.

If the model is divided among devices, vLLM has a process for each device: see `processes.ranks`. The
scheduler stays in this process, so all of the above holds for ranks too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
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
from millrace.devices.large_memory import each
from millrace.engines.vllm import loading
from millrace.engines.vllm.loading import load_version, lora_request
from millrace.engines.vllm.processes.rank_end import RankEnd
from millrace.engines.vllm.proof import Proof
from millrace.engines.vllm.vllm_arguments import DraftCounts, sampling_arguments
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake, Queues

PROOF = "proof"
"""The name of that request; every other request is called TRAJECTORY.LEASE."""


class StagedWeights(NamedTuple):
    version: int
    reader: WeightsReader
    digest: str
    expected: torch.Tensor


class VllmMode(Queues):
    """See `rollout.protocol.Engine`. A subclass says how vLLM gets requests, steps and weights."""

    _asleep = False

    def __init__(
        self,
        intake: Intake,
        proof: Proof,
        *,
        slots: int,
        seeded: bool,
        native: bool,
        computes: str,
        drafts: DraftCounts | None,
    ) -> None:
        """`native`: versions are adapters, which vLLM computes beside the base weights. `drafts`: their
        counts, if vLLM drafts."""
        super().__init__(intake)
        self._proof, self._slots, self._seeded, self.computes = proof, slots, seeded, computes
        self._native, self._drafts = native, drafts or DraftCounts()
        self._staged: StagedWeights | None = None
        self._served: StagedWeights | None = None
        self._running: dict[int, Continuation] = {}  # by trajectory

    # ------------------------------------------------------------ of a mode

    @abstractmethod
    def _load(self, staged: StagedWeights) -> None:
        """Put `staged` into the model of every rank. Keys and values of other versions are forgotten."""

    @abstractmethod
    def logprobs(self) -> tuple[list[float], list[Any]]:
        """Log-probs of the proof's tokens but the first, and all outputs of the steps that this took."""

    @abstractmethod
    def _abort(self, name: str) -> None:
        """End the request `name`."""

    @abstractmethod
    def _release_memory(self) -> None:
        """`memory.release` in every rank; no request is left."""

    @abstractmethod
    def _take_memory(self) -> None:
        """`memory.take_again` in every rank."""

    def _pause(self) -> None:
        """Note all tokens that were sampled. Nothing is sampled until `_take_memory`."""

    # ------------------------------------------------------------ one device in shifts

    def sleep(self) -> None:
        if self._asleep:
            return
        self._pause()
        for continuation in list(reversed(self._running.values())):
            self._waiting.appendleft(self._end(continuation))
        self.version, self._asleep = -1, True
        self._release_memory()

    def wake(self) -> None:
        if self._asleep:
            self._take_memory()
        self._asleep = False

    # ------------------------------------------------------------ weights

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        """Digest the bytes in the relay's memory, and compute the proof's log-probs. Nothing is copied:
        `swap` reads the bytes once more."""
        with reader.view(version) as (staged, buffers):
            digest = digest_buffers(buffers, kind_of(staged), each=each)
            expected = self._proof.expected(buffers)
        self._staged = StagedWeights(version, reader, digest, expected)
        return staged, digest

    def swap(self, version: int) -> None:
        """Raises also UnknownVersionError: the version was overwritten after `stage`; the earlier version is
        served on. WorkerError: the version was overwritten during the load; the model is of no version, and
        this process must start anew."""
        staged = self._staged
        assert staged is not None and staged.version == version, (version, staged)
        self._load(staged)
        self.version, self._served, self._steps_since_swap = version, staged, 0
        self._prove(staged)

    def digest(self) -> str:
        """The digest of the loaded bytes, after a proof that vLLM computes with them."""
        assert self._served is not None, "nothing is served"
        self._prove(self._served)
        return self._served.digest

    def _loaded(self, staged: StagedWeights, before: int, errors: Sequence[Sequence[Exception]]) -> None:
        """Raise what went wrong in the ranks: `errors` of each. The model is of no version then, unless no
        rank has changed; `before` is the version that was served."""
        failures = [error for of_rank in errors for error in of_rank]
        if not failures:
            return
        if len([error for error in failures if isinstance(error, UnknownVersionError)]) == len(errors):
            self.version = before
        elif all(isinstance(error, (UnknownVersionError, TornVersionError)) for error in failures):
            raise WorkerError(
                f"vLLM has half of version {staged.version}, and must start anew: {failures[0]}"
            ) from failures[0]
        raise failures[0]

    def _prove(self, staged: StagedWeights) -> None:
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

    # ------------------------------------------------------------ work

    def _next_works(self) -> list[Continuation]:
        """Take as many waiting continuations as there are free slots. They are running from now on."""
        works = []
        while self._waiting and len(self._running) < self._slots:
            continuation = self._waiting.popleft()
            self._running[continuation.work.trajectory_id] = continuation
            works.append(continuation)
        return works

    def _request(self, continuation: Continuation) -> dict[str, Any]:
        """Name, prompt and parameters of a request for vLLM. The cache of prefixes is salted with the
        version, so no request finds old keys."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(continuation, seeded=self._seeded)
        return {
            "request_id": name_of(continuation),
            "prompt": {
                "prompt_token_ids": list(continuation.tokens),
                "cache_salt": f"version {self.version}",
            },
            "params": SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA),
            "priority": 1,
            **self._adapter(),
        }

    def _proof_request(self) -> dict[str, Any]:
        from vllm import SamplingParams

        return {
            "request_id": PROOF,
            "prompt": {"prompt_token_ids": self._proof.tokens},
            "params": SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            "priority": 0,
            **self._adapter(),
        }

    def _adapter(self) -> dict[str, Any]:
        """The argument that names the adapter. Before the first version there is none."""
        return {"lora_request": lora_request()} if self._native and self._served is not None else {}

    def _proof_logprobs(self, output: Any) -> list[float]:
        pairs = zip(output.prompt_logprobs[1:], self._proof.tokens[1:], strict=True)
        return [position[token].logprob for position, token in pairs]

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
        for token, logprobs in zip(completion.token_ids, completion.logprobs or (), strict=True):
            if continuation.finish is not None:  # vLLM has gone on beyond an end that it does not know
                break
            top_logprobs = _top_logprobs(logprobs, continuation.work.sampling.logprobs)
            continuation.append(token, logprobs[token].logprob, self.version, top_logprobs)
            self._generated += 1
        if continuation.finish is not None:
            trajectory_id = continuation.work.trajectory_id
            self._finished[trajectory_id] = self._end(continuation, ended=output.finished)
        elif output.finished:
            raise WorkerError(
                f"vLLM ended {name_of(continuation)} ({completion.finish_reason}): it should have gone on"
            )

    def _end(self, continuation: Continuation, *, ended: bool = False) -> Continuation:
        """Take the request away from vLLM. `ended`: vLLM has ended the request by itself."""
        if not ended:
            self._abort(name_of(continuation))
        return self._running.pop(continuation.work.trajectory_id)

    def _stop(self, continuation: Continuation) -> Continuation:
        return self._end(continuation)

    def _under_way(self) -> Collection[Continuation]:
        return self._running.values()


def name_of(continuation: Continuation) -> str:
    return f"{continuation.work.trajectory_id}.{continuation.work.lease}"


def _trajectory(name: str) -> int:
    """-1: the proof."""
    return -1 if name == PROOF else int(name.partition(".")[0])


def _top_logprobs(logprobs: dict[int, Any], num: int) -> Row | None:
    """The row of one position. `logprobs` has the sampled token too, at whatever rank."""
    if not num:
        return None
    tokens = sorted(logprobs, key=lambda token: logprobs[token].rank)[:num]
    return tokens, [logprobs[token].logprob for token in tokens]


# ---------------------------------------------------------------- in this process


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
