"""Publishing: each device's own blocks of the weights, as bytes in a relay's slot. Nothing is gathered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.core.digest import Filling, NamedBuffer, TensorSpec, digest_blocks, lay_out
from millrace.core.protocols import WeightsWriter
from millrace.core.types import Endpoint, Published
from millrace.devices.large_memory import each
from millrace.trainer.publish.fillings import begin_on_hosts, end_on_host
from millrace.trainer.publish.rechecked import RecheckedPublisher, digest_of
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none
from millrace_jax.weights import LAYERS, Tree


class JaxPublisher(RecheckedPublisher):
    """Publishes versions of weights in `dtype`. `dims`: the shapes of a version's tensors, in their order.

    When `begin` returns, the bytes are in the slot. The weights may be trained on while they are digested. An
    update gives their memory away, so it calls `before_update` first. Each of several processes writes its
    own blocks into the relay of its host, and only digests go from process to process.

    Args:
        current: the weights as they are now, for the digest before an update or a checkpoint; None: no such
            digest.
    """

    def __init__(
        self,
        dims: Mapping[str, tuple[int, ...]],
        dtype: Any,
        ranks: Ranks = ALONE,
        *,
        current: Callable[[], Tree] | None = None,
    ) -> None:
        super().__init__(ranks)
        self._dims, self._dtype, self._current = dims, jnp.dtype(dtype), current
        self.manifest: list[TensorSpec] = lay_out(
            (name, self._dtype.name, shape, int(np.prod(shape)) * self._dtype.itemsize)
            for name, shape in dims.items()
        )
        self._rounded = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(self._dtype), tree))
        self._copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version."""
        return sum(spec.num_bytes for spec in self.manifest)

    def begin(
        self, opened: Callable[[], WeightsWriter], endpoint: Endpoint, version: int, weights: Tree
    ) -> None:
        """Copy `weights` into a slot of `endpoint`, this host's relay. A repeat writes nothing. If only other
        hosts have a new endpoint, this host's slot stays."""
        began_s = time.perf_counter()
        stays = self._overlapped.wait() and self._begun == (endpoint, version)
        fillings = begin_on_hosts(self._ranks, opened, version, self.manifest, stays=stays)
        if not any(fillings):
            return
        rounded = weights if self._dtype == jnp.float32 else self._rounded(weights)
        blocks, fault = list(blocks_of(rounded, self._dims)), None
        self._begun, self._fresh = (endpoint, version), self._current is not None
        writer, filling = opened(), fillings[self._ranks.host]
        try:
            if filling is not None:
                writer.fill(filling, self.manifest, blocks)
        except Exception as error:
            fault = error  # `_end` raises the error in every process
        self._overlapped.begin(partial(self._end, writer, filling, blocks, version, fault), began_s)

    def _end(
        self,
        writer: WeightsWriter,
        filling: Filling | None,
        blocks: list[NamedBuffer],
        version: int,
        fault: Exception | None,
    ) -> Published:
        ended_s, ranks = time.perf_counter(), self._overlapped.ranks
        with all_or_none(ranks):
            if fault is not None:
                raise fault
        digests = digest_blocks(blocks, each=each)
        self._published_digest = digest_of(digests, self._dtype.name)
        stall_s = self._overlapped.release()
        written = ranks.gather(digests)
        ended = agreed(ranks, lambda: end_on_host(ranks, writer, filling, self.manifest, written))
        digest = next(filter(None, ended))
        return Published(version, digest, self.weights_bytes, stall_s, time.perf_counter() - ended_s)

    def _current_digest(self) -> str:
        """Of a copy where a device has memory of its own: numpy keeps the host's copy of an array."""
        if self._current is None:
            return self._published_digest
        weights = self._current()
        if self._dtype != jnp.float32:
            weights = self._rounded(weights)
        elif jax.default_backend() != "cpu":
            weights = self._copied(weights)
        return digest_of(digest_blocks(list(blocks_of(weights, self._dims)), each=each), self._dtype.name)


def blocks_of(weights: Tree, dims: Mapping[str, tuple[int, ...]]) -> Iterator[NamedBuffer]:
    """The blocks of this process's devices, in the order of `dims`. Of equal blocks the first counts."""
    outside = {name: list(_shards(x)) for name, x in weights.items() if name != LAYERS}
    layered = {name: list(_shards(x)) for name, x in weights[LAYERS].items()}
    for name, whole in dims.items():
        layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
        if not name.startswith(f"{LAYERS}."):
            yield from (_buffer(name, whole, start, block) for start, block in outside[name])
            continue
        for start, block in layered[rest]:
            index = int(layer) - start[0]
            if 0 <= index < len(block):
                yield _buffer(name, whole, start[1:], block[index])


def _shards(x: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The places of an array's blocks, and the blocks, as numpy sees them."""
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(part.start or 0 for part in shard.index), np.asarray(shard.data)


def _buffer(name: str, dims: tuple[int, ...], start: tuple[int, ...], block: Any) -> NamedBuffer:
    data = np.ascontiguousarray(block).view(np.uint8).reshape(-1)
    whole = block.shape == dims
    return NamedBuffer(name, block.dtype.name, tuple(block.shape), data, None if whole else start)
