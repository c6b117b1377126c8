"""A small chaotic run without a controller. As a script it prints the digest of its trace.

python sim_scenario.py SEED
"""

from __future__ import annotations

import asyncio
import sys

import millrace_sim
from millrace.core import clock
from millrace.core.errors import UnknownVersionError, WorkerDied
from millrace.core.events import Events
from millrace.core.types import Sampling, Work
from millrace_sim.virtual.sim_runtime import SimRuntime

CHAOS = millrace_sim.Faults(
    failures=(millrace_sim.Failures("replica-*", mtbf_s=3.0),),
    slow=(millrace_sim.Slow("replica-1", factor=3.0),),
)
ROLES = "millrace_sim.roles"


async def chaotic(seed: int) -> str:
    digest, events = millrace_sim.TraceDigest(), Events(clock.now, clock.wall)
    events.subscribe(digest)
    runtime, world = SimRuntime(seed, faults=CHAOS), millrace_sim.World()
    trainer = await runtime.spawn("trainer", f"{ROLES}:SimTrainer", {"world": world})
    relay = await runtime.spawn("relay", f"{ROLES}:SimRelay", {"world": world, "slots": 3})
    state = await trainer.call("load", None, timeout_s=9)
    endpoint = await relay.call("open", state.slot_bytes, timeout_s=9)
    await trainer.call("publish", endpoint, timeout_s=9)
    published = await trainer.call("await_published", timeout_s=9)
    await relay.call("stage", published.version, published.digest, timeout_s=9)

    async def keep(name: str, first: int) -> int:
        left = set(range(first, first + 16))
        lease = 0
        while left:
            lease += 1
            kwargs = {"world": world, "slots": 4, "kv_capacity_tokens": 1000, "keep_kv": False}
            replica = await runtime.spawn(name, f"{ROLES}:SimReplica", kwargs)
            events.emit("up", name=name, epoch=replica.epoch)
            try:
                await replica.call("pull", 0, endpoint, timeout_s=9)
                works = [Work(tid, tid // 4, lease, [1, 2], [], Sampling(64), seed) for tid in sorted(left)]
                await replica.call("submit", works, timeout_s=9)
                async for report in replica.stream("reports"):
                    rows = [(p.trajectory_id, p.start, p.columns.runs) for p in report.progress]
                    events.emit("report", name=name, progress=rows)
                    for progress in report.progress:
                        if progress.finish is not None:
                            left.remove(progress.trajectory_id)
                    if not left:
                        break
            except (WorkerDied, UnknownVersionError) as error:
                events.emit("down", name=name, cause=str(error))
        return lease

    async with asyncio.TaskGroup() as group:
        waiting = {group.create_task(keep(f"replica-{i}", 100 * i)) for i in range(4)}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            events.emit("done", leases=[task.result() for task in done])
    await runtime.close()
    return digest.hexdigest()


if __name__ == "__main__":
    seed = int(sys.argv[1])
    print(millrace_sim.run(chaotic(seed), seed=seed, time_max_s=3600.0))
