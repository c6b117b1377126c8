"""A placement in words: the memory of each host and device, warnings where memory is tight, and settings
with which a run wastes a GPU, each with its cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.schema import Config
from millrace.core.placement import Gpu, Place
from millrace.placement.assign import TIGHT, Placement, size
from millrace.placement.hosts import Layout
from millrace.placement.memory.activation_memory import ActivationMemory
from millrace.placement.memory.engine_memory import CONTEXT_BYTES, LIBRARIES_BYTES
from millrace.placement.memory.needs import MemoryNeed


def tables(layout: Layout) -> dict[str, str]:
    """`table`. With several hosts there is a table for each, which begins with the workers on that host."""
    if len(layout.placements) == 1:
        return table(layout.main)
    rows = {}
    for placed in layout.placements:
        name, num = placed.host.name, len(placed.replicas)
        there = f"{'the trainer, ' if placed.trains else ''}a relay, {num} replica{'' if num == 1 else 's'}"
        rows[name] = there
        rows |= {f"{name}: {key}": value for key, value in table(placed).items() if _concerns(placed, key)}
    return rows


def _concerns(placed: Placement, key: str) -> bool:
    absent = () if placed.trains else ("the trainer", "a rank", "a micro-batch")
    return not key.startswith((*absent, *(() if placed.replicas else ("a replica", "a step"))))


def tight(layout: Layout, config: Config) -> Iterator[str]:
    """The `warnings` of every host."""
    several = len(layout.placements) > 1
    for placed in layout.placements:
        for warning in warnings(placed, config):
            yield f"{placed.host.name}: {warning}" if several else warning


def table(placement: Placement) -> dict[str, str]:
    """Name -> value: the workers and the memory of every device, of the host, and shared memory."""
    needs, host = placement.needs, placement.host
    rows = {}
    for gpu in host.gpus if placement.device == "cuda" else ():
        workers = [f"{name} {p.share:.0%} ({size(m.device_bytes)})" for name, p, m in on(placement, gpu)]
        memory = f"{size(gpu.memory_bytes)}, {size(gpu.free_bytes)} free"
        rows[f"GPU {gpu.index}"] = f"{gpu.name}, {memory}: {', '.join(workers) or 'nobody'}"
    moment = needs.activation_memory
    where = (
        "on GPUs"
        if placement.device == "cuda"
        else f"on {host.cores} cores, bound to none{_threads(placement)}"
    )
    ranks = placement.trainer.ranks
    each = f" in {ranks} ranks" if ranks > 1 else ""
    older, reads = "", dict[str, str]()
    if placement.relay_keeps_deltas:
        older = " and older ones as deltas in half of one"
        reads["a replica that reads an older version"] = f"{size(placement.older_bytes)} more, in host memory"
    return {
        "computes": where,
        **rows,
        "the trainer, host memory": f"{size(needs.trainer.host_bytes)}{each}",
        "a replica, host memory": size(needs.replica.host_bytes),
        **_cache(needs.replica),
        **_reference(needs.reference),
        "a micro-batch in the trainer": (
            f"{moment.micro_batch_tokens:,} tokens: about {size(moment.trainer_bytes)} more, at most"
            + (", in each rank" if ranks > 1 else "")
        ),
        "a rank of the trainer, at most": f"{size(placement.rank_peak_bytes)}, beside Python and torch",
        "a step of a replica": f"about {size(moment.replica_bytes)} more, at most",
        **reads,
        "the relay, shared memory": (
            f"{placement.relay_slots} versions of {size(needs.weights_bytes)}{older} = "
            f"{size(placement.relay_bytes)}"
        ),
        "the host": (
            f"{size(placement.processes_bytes)} + {size(placement.relay_bytes)} shared, of "
            f"{size(host.memory_bytes)}, {size(host.free_bytes)} free"
        ),
    }


def _threads(placement: Placement) -> str:
    trainer = f"; the trainer on {placement.trainer.threads} threads" if placement.trains else ""
    replica = next((f"; a replica on {place.threads}" for place in placement.replicas), "")
    return trainer + replica


def _cache(need: MemoryNeed) -> dict[str, str]:
    """Of an engine that sizes its own."""
    if not need.cache_bytes:
        return {}
    return {"a replica's cache": f"what is left of its GPUs; {size(need.cache_bytes)} would hold every slot"}


def _reference(need: MemoryNeed) -> dict[str, str]:
    need_bytes = need.device_bytes + need.host_bytes
    return {"the reference": f"{size(need_bytes)}, in a process of its own"} if need_bytes else {}


def on(placement: Placement, gpu: Gpu) -> list[tuple[str, Place, MemoryNeed]]:
    """The workers that compute on `gpu`."""
    return [worker for worker in placement.workers if gpu.index in (worker[1].devices or ())]


def warnings(placement: Placement, config: Config) -> Iterator[str]:
    """Warnings where memory is tight, one sentence each."""
    host, needed = placement.host, placement.processes_bytes + placement.relay_bytes
    moment, replicas = placement.needs.activation_memory, len(placement.replicas)
    room = host.free_bytes - needed - replicas * moment.replica_bytes
    room //= placement.trainer.ranks
    if needed + replicas * placement.older_bytes > TIGHT * host.free_bytes:
        yield (
            f"the run keeps {size(placement.processes_bytes)} of host memory and, shared, "
            f"{size(placement.relay_bytes)}; {size(host.free_bytes)} of {size(host.memory_bytes)} are free. "
            "What it needs for a moment may not fit"
        )
    elif placement.device == "cpu" and moment.trainer_bytes > room:
        yield _too_large(moment, config, room, "host memory")
    if placement.relay_slots < placement.relay_slots_max and not placement.relay_keeps_deltas:
        yield (
            f"the relay has room for {placement.relay_slots} versions, and up to {placement.relay_slots_max} "
            "are of use: a trajectory whose replica dies starts again from its prompt if its version is gone"
        )
    if placement.device == "cuda":
        for gpu in host.gpus:
            yield from _gpu_warnings(placement, config, gpu)


def _too_large(moment: ActivationMemory, config: Config, room: float, where: str) -> str:
    """The warning that the trainer's largest micro-batch may need more than `room`."""
    longest, budget = config.rollout.max_sequence_tokens, config.batch.token_budget
    fit = moment.tokens_that_fit(room)
    lower = f"`batch.token_budget` ({budget:,}) to {fit:,}"
    if fit < longest:
        lower = f"`rollout.max_sequence_tokens` ({longest:,}): {fit:,} tokens fit"
    recompute = "" if config.model.recompute else ", or set `model.recompute` to true"
    return (
        f"a micro-batch of {moment.micro_batch_tokens:,} tokens, the largest, needs about "
        f"{size(moment.trainer_bytes)} in the trainer, and {size(max(0.0, room))} of {where} are left for "
        f"it. Lower {lower}{recompute}"
    )


def _gpu_warnings(placement: Placement, config: Config, gpu: Gpu) -> Iterator[str]:
    workers, moment = on(placement, gpu), placement.needs.activation_memory
    if not workers:
        yield f"nobody computes on GPU {gpu.index}: raise `rollout.replicas` ({len(placement.replicas)})"
    for name, place, memory in workers:
        room = place.share * gpu.memory_bytes - memory.device_bytes - CONTEXT_BYTES
        if place is placement.trainer and moment.trainer_bytes > room:
            yield _too_large(moment, config, room, f"GPU {gpu.index}")
        elif place is not placement.trainer and moment.replica_bytes > room:
            yield (
                f"{name} needs about {size(moment.replica_bytes)} for a moment, and {size(room)} of GPU "
                f"{gpu.index} are left for it. Lower `rollout.prefill_chunk` "
                f"({config.rollout.prefill_chunk:,}) or `rollout.slots` ({config.rollout.slots:,})"
            )
        elif room < (1 - TIGHT) * place.share * gpu.memory_bytes:
            yield f"{name} has {size(room)} of GPU {gpu.index} left for what it needs for a moment"
    kept = [memory.device_bytes + CONTEXT_BYTES for _, _, memory in workers]
    needed = max(kept, default=0) if placement.colocated else sum(kept)
    if workers and needed > gpu.free_bytes:
        yield (
            f"GPU {gpu.index} has {size(gpu.free_bytes)} free, and the run keeps {size(needed)} there: "
            "another process uses it"
        )


# ---------------------------------------------------------------- a GPU that is wasted


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
