"""The memory of a torch engine that sleeps: weights, keys and values are dropped."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.devices.released_memory import ReleasedMemory
from millrace.engines.own.accelerated.flash import RecordedSteps
from millrace.engines.own.cache import KVCache
from millrace.engines.own.parameters import Parameters


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
