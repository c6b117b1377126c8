"""A controller that sets up trouble, says so, and waits to be ended: it cleans up nothing."""

import asyncio
import os
import signal

import start_methods  # noqa: F401 (it says how workers are started)

from millrace.runtime.local.local_runtime import LocalRuntime

PROCESS = "runtime_workers:Process"
print("main", flush=True)


async def main() -> None:
    runtime = LocalRuntime()
    family, busy, idle, stopped = [
        await runtime.spawn(name, PROCESS) for name in ("family", "busy", "idle", "stopped")
    ]
    async with asyncio.TaskGroup() as group:
        await family.call("children", timeout_s=30.0)
        group.create_task(busy.call("spin", timeout_s=1000.0))
        await anext(family.stream("block", 1000.0))
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        await idle.call("number", timeout_s=30.0)
        print("ready", flush=True)
        await asyncio.sleep(1000.0)


if __name__ == "__main__":
    asyncio.run(main())
