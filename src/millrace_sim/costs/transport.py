"""Costs of moving a new version to the replicas, per transport.

Every function returns the same times: the trainer's wait, the time until a replica may read, the replica's
reading during decoding, the replica's wait, and the trainer's digest during its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from millrace_sim.costs.hardware import Device
from millrace_sim.costs.models import ModelSizes

Transport = Literal["relay", "ddma", "collective", "disk", "delta"]
"""How weights reach the replicas."""

PUSH_BYTES_PER_S = 103e9
"""Trainer to master relay. Calibrated on Laminar's two stalls, 0.64 s for 32B and 1.40 s for 72B in bf16
(arXiv:2510.12633, section 8)."""
CHUNK_S = 0.0003
"""Latency of one chunk on one hop of the chain. Calibrated on a chain of five hosts: 0.1 to 0.4 ms a hop."""
LINK_EFFICIENCY = 0.8
"""Achieved fraction of a link's rate in large copies."""
COLLECTIVE_TENSOR_S = 0.001
"""Set-up of gathering and broadcasting one tensor. Assumed: a metadata call and two NCCL launches."""
TENSORS_PER_LAYER = 12
DISK_BYTES_PER_S = 2e9
"""Rate of a shared file system, per reader or writer. Assumed."""
DELTA_BYTES_FRACTION = 0.01
"""Encoded change of a step at a learning rate of 1e-6: 14 GB to 108 MB (PULSE, arXiv:2602.03839)."""
DELTA_ENCODE_BYTES_PER_S = 20e9
"""Comparing and packing on the host. Calibrated: 100 M bf16 parameters in 0.2 s on one core, 20 cores."""
DIGEST_BYTES_PER_S = 5e9
"""XXH3 of weights in memory, one core for each device of the trainer, beside its step. The least of
5 to 25 GB/s that two shared cores of a small CPU showed."""
SWAP_S = 0.05
"""Between two decode steps: exchanging pointers to standby weights and dropping captured state. Assumed."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds. The first two are the trainer's and the network's, the next two each replica's."""

    trainer_stall_s: float
    available_s: float  # from the end of the digest until replicas may read
    background_s: float  # a replica reads, decoding meanwhile
    replica_stall_s: float  # a replica waits
    fetch_s: float = (
        0.0  # one relay receives from another; where hosts are simulated, in place of `available_s`
    )
    digest_s: float = 0.0  # from the end of the stall; the trainer computes meanwhile


def transfer(
    kind: Transport,
    model: ModelSizes,
    device: Device,
    *,
    trainer_devices: int,
    replicas: int,
    tensor_parallel: int,
    dtype: str = "bf16",
) -> Transfer:
    """The cost of one version by `kind`."""
    size = float(model.weights_bytes(dtype))
    hosts = max(1, math.ceil(replicas * tensor_parallel / device.devices_per_host))
    link = device.scale_out_bytes_per_s * LINK_EFFICIENCY
    load_s = size / tensor_parallel / (device.host_bytes_per_s * LINK_EFFICIENCY)
    digest_s = size / trainer_devices / DIGEST_BYTES_PER_S
    match kind:
        case "relay":
            chain, hop = (chain_s(n, size, link * device.devices_per_host) for n in (hosts, 2))
            return Transfer(size / PUSH_BYTES_PER_S, chain, load_s, SWAP_S, hop, digest_s)
        case "ddma":
            stall = SWAP_S + ddma_s(size, link, trainer_devices, replicas, tensor_parallel)
            return Transfer(stall, 0.0, 0.0, stall)
        case "collective":
            stall = SWAP_S + collective_s(model, size, link)
            return Transfer(stall, 0.0, 0.0, stall)
        case "disk":
            return Transfer(size / DISK_BYTES_PER_S, 0.0, 0.0, size / DISK_BYTES_PER_S + SWAP_S)
        case "delta":
            encoded = size * DELTA_BYTES_FRACTION
            chain, hop = (chain_s(n, encoded, link * device.devices_per_host) for n in (hosts, 2))
            encode_s = size / DELTA_ENCODE_BYTES_PER_S
            return Transfer(encode_s, chain, encode_s, SWAP_S, hop, digest_s)


def chain_s(relays: int, size: float, bytes_per_s: float) -> float:
    """A pipelined chain of n relays, at its best number of chunks k (arXiv:2510.12633, section 4):

        T = (k + n - 2) (M / (k B) + a),    k* = sqrt((n - 2) M / (a B))

    One relay has nothing to forward to.
    """
    if relays < 2:
        return 0.0
    chunks = max(1.0, math.sqrt((relays - 2) * size / (CHUNK_S * bytes_per_s)))
    return (chunks + relays - 2) * (size / (chunks * bytes_per_s) + CHUNK_S)


def ddma_s(size: float, link: float, trainer_devices: int, replicas: int, tensor_parallel: int) -> float:
    """Every trainer rank sends its shard device to device (LlamaRL, arXiv:2505.24034, section 5). A replica's
    device receives its own share. The copies for all replicas go out as a tree from the trainer's links."""
    receive_s = size / tensor_parallel / link
    send_s = size / trainer_devices / link * math.ceil(math.log2(replicas + 1))
    return max(receive_s, send_s)


def collective_s(model: ModelSizes, size: float, link: float) -> float:
    """Gather each tensor on one rank, then broadcast it to all replicas: two passes of the whole model
    through one device's link, and a set-up for every tensor."""
    return 2 * size / link + model.layers * TENSORS_PER_LAYER * COLLECTIVE_TENSOR_S
