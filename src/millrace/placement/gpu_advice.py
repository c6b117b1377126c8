"""Settings with which a run wastes a GPU, each in one sentence with its cost. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.placement.assign import Placement, size
from millrace.placement.memory.engine_memory import CONTEXT_BYTES, LIBRARIES_BYTES

SLOWER = 15
"""Products in float32 against products in bfloat16, by the data sheets of A100 and H100. TF32 stays off, as
torch has it: its 10 bits of mantissa would part the log-probs of trainer and engine."""


def gpu_advice(placement: Placement, config: Config) -> Iterator[str]:
    """Nothing on a CPU."""
    if placement.device != "cuda":
        return
    if config.model.dtype == "float32":
        yield from _float32(placement, config)
    if config.rollout.engine == "own" and placement.replicas:
        yield from _few_slots(placement, config)


def _float32(placement: Placement, config: Config) -> Iterator[str]:
    needs, rollout = placement.needs, config.rollout
    kv_bytes = rollout.slots * rollout.max_sequence_tokens * needs.kv_token_bytes
    yield (
        '`model.dtype` is "float32": on a GPU its products take about '
        f"{SLOWER} times as long as in bfloat16 (TF32 is off). Each version takes "
        f"{size(needs.weights_bytes)} and the KV of a replica {size(kv_bytes)}, in bfloat16 half of both. "
        'Set it to "bfloat16": master weights stay float32'
    )


def _few_slots(placement: Placement, config: Config) -> Iterator[str]:
    """Fewer slots than fit, while trajectories of a step wait for one."""
    rollout, needs = config.rollout, placement.needs
    here = {gpu.index: gpu.memory_bytes for gpu in placement.host.gpus}
    replica = placement.replicas[0]
    device_bytes = replica.share * min((here[index] for index in replica.devices or ()), default=0)
    taken = needs.replica.device_bytes + needs.activation_memory.replica_bytes
    room = device_bytes - taken - CONTEXT_BYTES - LIBRARIES_BYTES
    fit = rollout.slots + int(room // max(1, needs.kv_token_bytes * rollout.max_sequence_tokens))
    useful = min(fit, -(-config.trajectories_per_step // rollout.replicas))
    if useful >= 2 * rollout.slots:
        yield (
            f"`rollout.slots` is {rollout.slots}, and a replica's GPU has room for {fit:,}. A step takes "
            f"{config.trajectories_per_step:,} trajectories, and a decode step of a GPU takes hardly longer "
            f"with more of them: raise it to {useful:,}"
        )
