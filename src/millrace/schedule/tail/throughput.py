"""StaleFlow's estimate: the throughput of a replica by its load, and what one more trajectory adds to it.

    T(n, K) = n / (k1 K + max(k2, k3 n) + k4)          arXiv:2601.12784

n trajectories hold K tokens of KV together. The denominator is the time of a decode step. Only ratios of T
decide, so the unit of time is a step over an empty cache, k2 + k4. Then k1 is `KV_FULL` over the replica's KV
capacity. Matrices become the bound at the replica's slots.

Differs: the paper profiles k1 to k4 on the hardware. Here they follow from slots and KV capacity, and from
one assumed ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.schedule.view import ReplicaView, View

KV_FULL = 2.0
"""A step over a full KV cache takes so many steps over an empty one longer: the cache is so many times as
large as the weights that a step reads. Assumed: 1.7 to 3.8 for 7B to 32B in bf16 on 80 to 96 GB."""
SEQUENCE_SHARE = 0.25
"""A trajectory without tokens counts with this share of the longest sequence. Assumed."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Trajectories go where they add most throughput, while they add at least `gain_min` (the paper's mu) of
    what the first one adds to an idle replica."""

    gain_min: float

    def gain(self, view: View, replica: ReplicaView, load: int) -> float:
        """What one more trajectory adds at `load`, over what the first one adds: at most 1, and below 0 where
        it slows the others more than it gives."""
        each = self._tokens_each(view, replica)
        tokens = replica.kv_used_tokens + max(0, load - replica.running) * each
        more = _throughput(replica, load + 1, tokens + each) - _throughput(replica, load, tokens)
        return more / _throughput(replica, 1, each)

    def groups(self, view: View, replica: ReplicaView) -> int:
        """Groups that may start there now. No whole group waits for slots: it is routed later, and to
        younger weights."""
        load = replica.load
        while load < replica.slots and self.gain(view, replica, load) >= self.gain_min:
            load += view.start_size
        return (load - replica.load) // view.start_size

    def _tokens_each(self, view: View, replica: ReplicaView) -> float:
        running = replica.kv_used_tokens / replica.running if replica.running else 0.0
        return max(running, SEQUENCE_SHARE * view.max_sequence_tokens)


def _throughput(replica: ReplicaView, load: int, kv_tokens: float) -> float:
    step = KV_FULL * kv_tokens / replica.kv_capacity_tokens + max(1.0, load / replica.slots)
    return load / step
