"""The protocol of an engine, the inference software inside a replica.

An engine is synchronous and owns no thread that the replica must know. One thread makes every call, so every
command falls between two steps. Only `stage` is called from a second thread, while steps go on.
`tests/engines` checks every engine against this page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from millrace.config.tables.generation import Rollout
from millrace.config.tables.training import Model
from millrace.core.protocols import WeightsReader
from millrace.core.supported import Supported
from millrace.core.types import Progress, ReplicaLoad, Work

_MODEL, _ROLLOUT = Model(path=""), Rollout()
"""The defaults of keys."""


class NativeAdapter(msgspec.Struct, frozen=True):
    """Of adapters that an engine computes beside the weights in `model_path`: their rank, the factor of
    `low_rank.adapted`, and the ends of the names of their matrices."""

    rank: int
    scale: float
    targets: tuple[str, ...]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an engine. `device` is `cpu`, `cuda` or `auto`; the engine may take the fraction
    `device_share` of its memory. `server` is the URL of a running server, which may take `server_wait_s` to
    answer. For the replica is `adapter_scale`: versions are adapters, added with this factor. With `probe`
    it asks the engine whether it samples as it says, before the first trajectory. With
    `native_adapter` the engine itself gets the adapters. `keep_kv`: a trajectory that ends may come back with
    another turn, as `Config.keeps_kv` says. Every other option is a key of `model` or `rollout`, with the
    default of that key."""

    model_path: str
    keep_kv: bool
    probe: bool
    dtype: str = _MODEL.dtype
    adapter_scale: float | None = None
    native_adapter: NativeAdapter | None = None
    device: str = _MODEL.device
    device_share: float = 1.0
    tensor: int = _ROLLOUT.tensor
    slots: int = _ROLLOUT.slots
    max_sequence_tokens: int = _ROLLOUT.max_sequence_tokens
    prefill_chunk: int = _ROLLOUT.prefill_chunk
    exact: bool = _ROLLOUT.exact
    recompute: bool = _ROLLOUT.recompute
    quantization: str | None = _ROLLOUT.quantization
    stepwise: bool = _ROLLOUT.stepwise
    seeded: bool = _ROLLOUT.seeded
    drafts: str | None = _ROLLOUT.drafts
    draft_tokens: int = _ROLLOUT.draft_tokens
    draft_rows_max: int = _ROLLOUT.draft_rows_max
    draft_model: str | None = _ROLLOUT.draft_model
    colocated: bool = _ROLLOUT.colocated
    server: str = ""
    server_wait_s: float = 0.0
    shared_dir: str | None = _ROLLOUT.shared_dir


class Capabilities(msgspec.Struct, frozen=True):
    """The capabilities of an engine, known before it is opened.

    `settings`: the configuration keys that the engine understands, among those of
    `engine_kinds.refuse_unable`. `models`: the models that the engine runs; None if only its start can tell.
    `quantised`: those that it runs with `rollout.quantization`.
    `shares_prefixes`: members of a group compute their prompt once.
    `chunks_prompts`: a step computes at most `rollout.prefill_chunk` tokens of prompts.
    `drafts`: the values of `rollout.drafts` that the engine takes.
    `temperature_max`: of `sampling.temperature`.
    """

    settings: frozenset[str]
    shares_prefixes: bool
    chunks_prompts: bool
    drafts: frozenset[str] = frozenset()
    models: Supported | None = None
    quantised: Supported | None = None
    temperature_max: float = math.inf


class Engine(Protocol):
    """An engine serves exactly one version at a time: `version`, -1 before the first `swap`. Until then work
    waits.

    `computes`: the number format, and whether the engine computes exactly; for people.
    """

    version: int
    computes: str

    # ------------------------------------------------------------ work

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""

    @property
    def has_finished(self) -> bool:
        """Whether a finished trajectory waits to be reported."""

    def submit(self, works: Iterable[Work]) -> None:
        """Queue works, each going on from its partial tokens. A newer lease of a trajectory replaces the old
        lease; a repeat or an older lease changes nothing. Raises: DataError: a work does not fit the engine;
        then no work is queued."""

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        """Forget these trajectories, and give back all tokens that this engine sampled of them, reported or
        not. Unknown ids, and ids that were reported to their end, are left out."""

    def step(self) -> None:
        """Advance every running trajectory by about one token. A step takes a second at most, or 30 s if a
        server is silent.

        Raises: WeightsError: a logit is not finite; the message names trajectories and version."""

    def take_progress(self, *, ended: bool = False) -> list[Progress]:
        """Tokens since the last call. Each token has the version that sampled it, and its log-prob in the
        distribution that it was drawn from. `ended`: those of trajectories that have ended are enough."""

    def load(self) -> ReplicaLoad:
        """Running and waiting trajectories, and the used tokens and the capacity of the KV cache; without
        `busy_s` and `idle_s`."""

    # ------------------------------------------------------------ weights

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        """Get `version` ready while steps go on. The served version does not change.

        Returns: the digest that the relay staged the version under, and the digest of the tensors that the
        next `swap` will serve.
        Raises: UnknownVersionError, TornVersionError, WeightsError."""

    def swap(self, version: int) -> None:
        """Serve the staged version from the next step on. Trajectories in flight go on under it. With
        `recompute` no trajectory uses keys and values of an earlier version. Without it a trajectory keeps
        the keys and values that it was decoding with.

        Raises: DigestMismatchError: the engine would not serve the staged weights. Then it serves nothing."""

    def digest(self) -> str:
        """Digest of the tensors that the engine computes with now, in state-dict order, in the published
        dtype."""

    # ------------------------------------------------------------ one device in shifts

    def sleep(self) -> None:
        """Give back the memory of weights, keys and values. Trajectories stay, with their tokens, and wait:
        `version` is -1. They go on under the next version, with keys and values recomputed. Work may be
        submitted and released meanwhile. A repeat changes nothing. An engine without `rollout.colocated` in
        its settings raises WorkerError."""

    def wake(self) -> None:
        """Take the memory again. The engine serves nothing before the next `stage` and `swap`. A repeat
        changes nothing."""

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End every process that the engine started, for a caller whose own process goes on. (The runtime
        kills all processes of a replica.) The last reference to the engine frees its memory. No other method
        is called after `close`, and a second `close` changes nothing."""
