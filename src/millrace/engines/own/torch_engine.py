"""The torch engine: continuous batching with exact sampling noise, on any torch device.

A step admits waiting work into free slots, computes at most `prefill_chunk` positions of prompts, and
decodes one token for every continuation whose keys and values are complete. Prefill covers all tokens but
the last. A decode step always feeds the last token, so every sampled token comes from the same code. Members
of a group prefill their prompt once. New weights are swapped in between two steps. Then the cache is
forgotten, and trajectories in flight are prefilled again under the new version.

The engine is synchronous and not thread-safe: its owner calls it from one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from millrace.core.digest import XXH3, NamedBuffer, kind_of
from millrace.core.errors import WeightsError
from millrace.core.protocols import WeightsReader
from millrace.core.types import ReplicaLoad
from millrace.devices.device import computes, computing_dtype, torch_device
from millrace.devices.gpu import has_flash, has_own_memory, mark, side_stream
from millrace.devices.pinned import copy_to_device, pinned
from millrace.devices.released_memory import ReleasedMemory
from millrace.devices.threads import on_threads, threads_of_process
from millrace.engines.own.accelerated.exact import check_attention, exact_matmul
from millrace.engines.own.accelerated.flash import PADDED, FlashCache, RecordedSteps, flash_prefill
from millrace.engines.own.accelerated.fused import FusedPass, gpu_pass
from millrace.engines.own.accelerated.native import NativeRows, native_pass
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.attention import DecodeAttention, Kernel, PrefillAttention, Segment
from millrace.engines.own.cache import KeptSequences, KVCache
from millrace.engines.own.decode import DecodeBatch
from millrace.engines.own.forward import Attention, ForwardPass
from millrace.engines.own.parameters import Parameters
from millrace.engines.own.sampling_options import recorded_routing, routing_memory
from millrace.rollout.continuation import Continuation
from millrace.rollout.intake import Intake, Queues
from millrace.rollout.protocol import EngineOptions


class Sleeping:
    """A part of `TorchEngine`, which is awake at first."""

    _released: ReleasedMemory | None = None

    def wake(self) -> None:
        if self._released is not None:
            self._released.take_again()
        self._released = None

    def _release(
        self, weights: Iterable[Parameters | None], cache: KVCache, recorded: RecordedSteps | None
    ) -> None:
        """Give back the memory of all sets of weights and of the cache, which is empty from now on."""
        cache.lengths.clear()
        if recorded is not None:
            recorded.forget()
        if self._released is None:
            tensors = [tensor for each in weights if each is not None for tensor in each.named.values()]
            cached = [cache.keys, cache.values]
            self._released = ReleasedMemory([*tensors, *cached], device_type=cache.keys.device.type)


class TorchEngine(Sleeping, Queues):
    """Millrace's own `Engine`; `protocol.py` documents each method.

    Args:
        eos_ids: token ids that end a completion.
        decode: tokens to text, needed for stop strings only.
    Raises: ConfigError: there is no such device, or the device cannot compute exactly.
    """

    def __init__(
        self,
        architecture: Architecture,
        options: EngineOptions,
        *,
        eos_ids: Iterable[int],
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self._options, self._vocab = options, architecture.vocab
        self._device = device = torch_device(options.device, options.device_share)
        self._dtype = dtype = getattr(torch, options.dtype)
        self._threads = 1 if options.exact else threads_of_process()
        computing = computing_dtype(dtype, device)
        intake = Intake(
            vocab=architecture.vocab,
            max_sequence_tokens=options.max_sequence_tokens,
            eos_ids=eos_ids,
            decode=decode,
        )
        super().__init__(intake)
        self._active = Parameters(architecture, computing, device)
        self._standby = Parameters(architecture, computing, device)
        straight = computing == dtype  # a pull writes the tensors that the engine computes with
        self._landing = None if straight else Parameters(architecture, dtype, torch.device("cpu"))
        self._settled = False  # whether the standby set has the weights of the landing set
        self._vacated = mark(device)  # after this mark nothing reads or writes the standby set
        self._kinds = XXH3, XXH3  # of hash: for the digests of the active and of the standby set
        scores = architecture.scale, architecture.cap, architecture.windows
        self._kernel = Kernel(*scores, options.exact, architecture.sinks)
        num_positions = self._kernel.num_keys(options.max_sequence_tokens)
        rows_in = computing
        if device.type == "cpu" and self._kernel.plain and not architecture.routed:
            rows_in = torch.float32  # only products are in a narrower format: the rest takes longer in that
        served = has_flash(device, computing, architecture.head_dim)
        self._forward = (gpu_pass if served else ForwardPass)(architecture, num_positions, rows_in, device)
        fused = isinstance(self._forward, FusedPass) and not options.exact
        flash = served and (self._kernel.plain or fused)
        shape = (
            architecture.num_layers,
            options.slots,
            architecture.num_kv_heads,
            num_positions,
            architecture.head_dim,
        )
        self._cache = (FlashCache if flash else KVCache)(shape, rows_in, device)
        self._kept = KeptSequences(self._cache, keeps=options.keep_kv)
        self._recorded: RecordedSteps | None = None
        if isinstance(self._cache, FlashCache):
            self._forward.matmul = PADDED
            self._recorded = RecordedSteps(self._forward, self._cache, self._kernel, architecture)
        if options.exact:
            rows = max(options.slots, options.prefill_chunk)
            self._forward.matmul = exact_matmul(self._forward, self._active, options.slots, rows)
            group = architecture.num_heads // architecture.num_kv_heads
            check_attention(self._cache, self._kernel, group=group)
        if architecture.routed:
            rows = self._forward.matmul.rows(options.slots)
            self._forward.routing = routing_memory(architecture, rows, device)
        self._native, why = native_pass(
            architecture, self._forward, self._cache, self._kernel, threads=self._threads
        )
        self._hidden: Callable[..., torch.Tensor] = (self._native or self._forward).hidden
        exactness = f"exact, {self._forward.matmul} on one thread" if options.exact else "not exact"
        exactness += f"; {self._threads} threads" if self._threads > 1 and device.type == "cpu" else ""
        recorded = "; decode steps are recorded" if self._recorded and self._recorded.is_recorded else ""
        recorded += "; fused kernels" if fused else ""
        recorded += "; attention in C" if self._native is not None else why and f"; attention in torch: {why}"
        self.computes = f"{computes(dtype, computing)}; {exactness}{recorded}"
        self._running: list[Continuation] = []  # index = slot
        self._batch: DecodeBatch | None = None  # of the last step, if it still holds

    # ------------------------------------------------------------ work

    def load(self) -> ReplicaLoad:
        load = self._counted_load(self._cache.num_slots * self._options.max_sequence_tokens)
        return replace(load, kv_used_tokens=sum(self._cache.lengths), **self._kept.counts())

    # ------------------------------------------------------------ weights

    def buffers(self) -> Iterator[NamedBuffer]:
        """The tensors that the engine computes with now, as bytes in the published dtype under their Hugging
        Face names. A wider dtype to compute in holds the same numbers, so rounding loses nothing."""
        return self._active.buffers(self._dtype)

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        staged = self._read(version, reader)
        return staged, self.digest_standby(kind_of(staged))

    def _read(self, version: int, reader: WeightsReader) -> str:
        """A GPU copies out of the slot by itself, on a stream beside its computation."""
        buffers = self.standby_buffers()
        if not has_own_memory(self._device) or self._landing is not None:
            return reader.read(version, buffers)
        reader.pin(pinned)
        return reader.read(version, buffers, partial(copy_to_device, self._device, self._vacated))

    def standby_buffers(self) -> list[NamedBuffer]:
        """Writable bytes of the set of weights that the next `swap` will serve; on a GPU, its tensors."""
        self._settled = False
        return (self._landing or self._standby).places()

    def load_standby(self, model_path: str) -> None:
        """Fill the standby weights from the safetensors files of a Hugging Face directory."""
        self._settled = False
        (self._landing or self._standby).load(model_path)

    def digest(self) -> str:
        return self._active.digest(self._dtype, self._kinds[0])

    @torch.inference_mode()
    def digest_standby(self, kind: str = XXH3) -> str:
        """Digest of the tensors that the next `swap` will serve, computed on their device.

        Steps may go on meanwhile in another thread. Steps do not touch the standby set, and on a GPU they do
        not wait for the digest.
        """
        with side_stream(self._device):
            self._settle()
            digest = self._standby.digest(self._dtype, kind)
        self._kinds = self._kinds[0], kind
        return digest

    def _settle(self) -> None:
        if self._landing is not None and not self._settled:
            self._standby.copy_from(self._landing)
        self._settled = True

    @torch.inference_mode()
    def swap(self, version: int) -> None:
        """Exchange the two sets of weights. A trajectory that keeps its keys and values shares them no
        more."""
        self._settle()
        self._active, self._standby = self._standby, self._active
        self._vacated = mark(self._device)
        self._forget_copies()
        self._kinds = self._kinds[::-1]
        self.version, self._steps_since_swap = version, 0
        self._batch = None
        self._kept.forget()
        for slot, continuation in enumerate(self._running):
            if self._options.recompute or not self._ready(slot):
                self._cache.forget(slot)
            else:
                continuation.prefix_key = (continuation.work.trajectory_id,)

    def _forget_copies(self) -> None:
        """Of weights."""
        self._forward.matmul.forget()
        if self._native is not None:
            self._native.forget()

    def sleep(self) -> None:
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._batch, self.version = None, -1
        self._forget_copies()
        self._kept.forget()
        self._release((self._active, self._standby, self._landing), self._cache, self._recorded)

    # ------------------------------------------------------------ steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, prefill, decode one token for each continuation that is ready."""
        if self.has_work:
            with on_threads(self._threads):
                self._step()

    def _step(self) -> None:
        while self._waiting and self._cache.can_allocate:
            slot = self._kept.allocate(self._waiting)
            assert slot == len(self._running), (slot, len(self._running))
            self._running.append(self._waiting.popleft())
            self._batch = None
        if self._batch is None:
            self._prefill()
        self._decode()

    def _prefill(self) -> None:
        if all(self._ready(slot) for slot in range(len(self._running))):
            return
        leaders = self._leaders()
        segments = self._plan_prefill(leaders)
        if segments:
            tokens = [t for s in segments for t in self._running[s.slot].tokens[s.start : s.start + s.count]]
            positions = [p for s in segments for p in range(s.start, s.start + s.count)]
            attention = self._prefill_attention(segments)
            self._hidden(self._active, self._padded(tokens), self._padded(positions), attention)
            for segment in segments:
                self._cache.extend(segment.slot, segment.count)
            self._prefilled += len(tokens)
        self._share(leaders)

    def _prefill_attention(self, segments: list[Segment]) -> Attention | NativeRows:
        if self._native is not None:
            return self._native.prefill(segments)
        if isinstance(self._cache, FlashCache):
            return flash_prefill(self._cache, segments, self._kernel)
        return PrefillAttention(self._cache, segments, self._kernel)

    def _plan_prefill(self, leaders: dict[tuple, int]) -> list[Segment]:
        """Up to `prefill_chunk` positions, first slots first. Followers wait for their leader."""
        budget, segments = self._options.prefill_chunk, []
        for slot, continuation in enumerate(self._running):
            start = self._cache.lengths[slot]
            count = min(len(continuation.tokens) - 1 - start, budget)
            follows = leaders[continuation.prefix_key] != slot and len(continuation.work.prompt) > 1
            if count > 0 and (start > 0 or not follows):
                segments.append(Segment(slot, start, count))
                budget -= count
        return segments

    def _leaders(self) -> dict[tuple, int]:
        """For each (group, prompt) the slot with the most computed positions."""
        leaders: dict[tuple, int] = {}
        for slot, continuation in enumerate(self._running):
            best = leaders.setdefault(continuation.prefix_key, slot)
            if self._cache.lengths[slot] > self._cache.lengths[best]:
                leaders[continuation.prefix_key] = slot
        return leaders

    def _share(self, leaders: dict[tuple, int]) -> None:
        """Copy complete prompts from leaders to followers without computed positions."""
        for slot, continuation in enumerate(self._running):
            shared, leader = len(continuation.work.prompt) - 1, leaders[continuation.prefix_key]
            if leader != slot and self._cache.lengths[slot] == 0 < shared <= self._cache.lengths[leader]:
                self._cache.copy(leader, slot, shared)

    def _decode(self) -> None:
        """One token for every ready slot."""
        batch = self._batch or self._decode_batch()
        if batch is None:
            return
        logits = self._logits(batch)
        if batch.rows is not None:
            logits = logits[batch.rows]
        sums = logits.sum(dim=-1)  # NaN and infinities survive a sum
        sampled = batch.sample(logits)
        complete = len(batch.slots) == len(self._running)
        self._batch = batch if complete else None  # other slots must be prefilled
        # All numbers are read at once, because each reading waits for the device.
        read = torch.stack([x.double() for x in (sampled.tokens, sampled.logprobs, sums)]).tolist()
        self._refuse_non_finite(batch.continuations, read[2])
        more = batch.sampler.top_logprobs(sampled), batch.sampler.token_masks(sampled)
        routing = recorded_routing(self._forward.routing, batch.continuations, batch.slots)
        self._note(batch, [int(token) for token in read[0]], read[1], *more, routing)
        if self._batch is not None and not batch.advance(sampled.tokens):
            self._batch = None

    def _logits(self, batch: DecodeBatch) -> torch.Tensor:
        """Logits of the batch's slots, the slots between the ready slots included."""
        if self._recorded is not None:
            return self._recorded.logits(self._active, len(batch.tokens))[: batch.count]
        hidden = self._hidden(self._active, batch.tokens, batch.positions, batch.attention)
        return self._forward.logits(self._active, hidden, batch.count)

    def _decode_batch(self) -> DecodeBatch | None:
        ready = [slot for slot in range(len(self._running)) if self._ready(slot)]
        if not ready:
            return None
        pad = self._forward.matmul.rows
        return DecodeBatch(
            self._running,
            ready,
            self._cache,
            pad=pad,
            attention=self._decode_attention,
            vocab=self._vocab,
            recorded=self._recorded,
        )

    def _decode_attention(self, positions: list[int]) -> DecodeAttention | NativeRows:
        if self._native is not None:
            return self._native.decode(positions)
        return DecodeAttention(self._cache, positions, self._kernel)

    def _note(self, batch: DecodeBatch, tokens: list[int], *columns: Sequence[Any]) -> None:
        """`columns`: log-probs, top log-probs, token masks and routing."""
        for slot, continuation, token, logprob, *more in zip(
            batch.slots, batch.continuations, tokens, *columns, strict=True
        ):
            self._cache.extend(slot, 1)
            continuation.append(token, logprob, self.version, *more)
        self._generated += len(tokens)
        self._steps_since_swap += 1
        self._retire(batch.slots)

    def _retire(self, slots: Sequence[int]) -> None:
        """Vacate those of `slots` whose continuation has its last token."""
        for slot in reversed(slots):
            if self._running[slot].finish is not None:
                continuation = self._vacate(slot)
                self._finished[continuation.work.trajectory_id] = continuation

    def _refuse_non_finite(self, continuations: list[Continuation], sums: list[float]) -> None:
        """`sums`: of the logits of each continuation."""
        if not math.isfinite(sum(sums)):
            bad = [
                s.work.trajectory_id
                for s, total in zip(continuations, sums, strict=True)
                if not math.isfinite(total)
            ]
            raise WeightsError(
                f"version {self.version} gives logits that are not finite for trajectories {bad[:8]} "
                f"({len(bad)} of {len(continuations)} decoded). The weights are broken: look at the "
                "gradient norm of the last steps, and go back to an earlier checkpoint."
            )

    def close(self) -> None:
        """Nothing to do: the engine has started no process."""

    # ------------------------------------------------------------ bookkeeping

    def _ready(self, slot: int) -> bool:
        return self._cache.lengths[slot] == len(self._running[slot].tokens) - 1

    def _padded(self, numbers: list[int]) -> torch.Tensor:
        padding = [0] * (self._forward.matmul.rows(len(numbers)) - len(numbers))
        return torch.tensor(numbers + padding, device=self._device)

    def _vacate(self, slot: int) -> Continuation:
        """Take the continuation out of `slot`; the last continuation moves in."""
        continuation = self._running[slot]
        moved = self._kept.release(slot, continuation)
        self._running[slot] = self._running[moved]
        self._running.pop()
        self._batch = None
        return continuation

    def _under_way(self) -> list[Continuation]:
        return self._running

    def _stop(self, continuation: Continuation) -> Continuation:
        return self._vacate(self._running.index(continuation))
