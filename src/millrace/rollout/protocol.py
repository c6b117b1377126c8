"""What an engine is to the replica: the inference software inside, whatever computes.

An engine is synchronous and owns no thread that the replica must know. One thread calls everything below, so
every command falls between two steps; `stage` alone is called from a second thread while steps go on.
`tests/engines` holds every engine to this page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from millrace.core.protocols import WeightsReader
from millrace.core.supported import Supported
from millrace.core.types import Progress, ReplicaLoad, Work


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is opened. `device` is `cpu`, `cuda` or `auto`; `device_share` of its memory may be
    taken. `server` is the URL of one that runs already, which may take `server_wait_s` to answer.
    `adapter_scale`: versions are adapters, whose products count so often; this is for the replica. The others
    are keys of `model` and `rollout`, under their names."""

    model_path: str
    dtype: str = "float32"
    adapter_scale: float | None = None
    device: str = "auto"
    device_share: float = 1.0
    tensor: int = 1
    slots: int = 32
    max_sequence_tokens: int = 512
    prefill_chunk: int = 512
    exact: bool = False
    recompute: bool = True
    server: str = ""
    server_wait_s: float = 0.0
    shared_dir: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    """What an engine can do, known before it is opened.

    `settings`: configuration keys that it understands, of those that `engine_kinds.refuse_unable` looks at.
    `models`: those that it runs; None where only its start tells.
    `shares_prefixes`: members of a group compute their prompt once.
    `chunks_prompts`: of prompts, a step computes no more than `rollout.prefill_chunk` tokens.
    `temperature_max`: of `sampling.temperature`.
    """

    settings: frozenset[str]
    shares_prefixes: bool
    chunks_prompts: bool
    models: Supported | None = None
    temperature_max: float = math.inf


class Engine(Protocol):
    """Serves exactly one version at a time: `version`, -1 before its first `swap`. Until then work waits.

    `computes`: in which number format, and whether exactly; for people.
    """

    version: int
    computes: str

    # ------------------------------------------------------------ work

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def has_finished(self) -> bool:
        """Whether a finished trajectory waits to be reported."""

    def submit(self, works: Iterable[Work]) -> None:
        """Queue works, each going on from its partial tokens. A newer lease of a trajectory replaces the old
        one; a repeat or an older lease changes nothing. Raises: DataError for what it cannot hold (and then
        none of the works is queued)."""

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        """Forget these and give back all that was sampled of them here, reported or not. Unknown ids, and
        those that were reported to their end, are left out."""

    def step(self) -> None:
        """Advance what runs, by about one token each. Returns within a second; one that asks a
        silent server may take 30 s.

        Raises: WeightsError when a logit is not finite, naming trajectories and version."""

    def take_progress(self) -> list[Progress]:
        """Tokens since the last call, each with the version that sampled it and its log-prob in the
        distribution that it was really drawn from."""

    def load(self) -> ReplicaLoad:
        """Slots, waiting, KV used and its capacity in tokens; without `busy_s` and `idle_s`."""

    # ------------------------------------------------------------ weights

    def stage(self, version: int, reader: WeightsReader) -> tuple[str, str]:
        """Get `version` ready while steps go on; what is served does not change.

        Returns: the digest that it was staged under, and the one taken of what the next `swap` will serve.
        Raises: UnknownVersionError, TornVersionError, WeightsError."""

    def swap(self, version: int) -> None:
        """Serve what was staged from the next step on. Trajectories in flight go on under it. Keys and values
        of an earlier version are never used again; with `recompute` off, only by the trajectories that were
        decoding with them.

        Raises: DigestMismatchError: what it would serve is not what was staged. It serves nothing then."""

    def digest(self) -> str:
        """Digest of the tensors that are computed with now, in state-dict order, in the published dtype."""

    # ------------------------------------------------------------ its end

    def close(self) -> None:
        """End every process that it started, for a caller whose own process goes on: of a replica the runtime
        kills them all. Its memory is free with the last reference to it. Nothing else is called after this,
        and a second call changes nothing."""
