"""Cost of the local runtime: starting workers, calling them, noticing their deaths.

    python benchmarks/runtime.py [--workers 8] [--preload torch,transformers] [--json]

Prints a table; with --json the last line is the same numbers as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time

from common import parser_of, sized

from millrace.runtime.local.local_runtime import LocalHandle, LocalRuntime

PROBE = "millrace.runtime.probe:Probe"


async def measure(num_workers: int, preload: tuple[str, ...]) -> dict[str, float]:
    runtime = LocalRuntime(preload=preload)
    try:
        numbers = {}
        started_s = time.perf_counter()
        first = await runtime.spawn("first", PROBE)
        numbers["first spawn, with preload (ms)"] = 1e3 * (time.perf_counter() - started_s)
        numbers["next spawn (ms), median of 10"] = statistics.median(
            [await spawn_ms(runtime) for _ in range(10)]
        )
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            spawns = [group.create_task(runtime.spawn(f"w{i}", PROBE)) for i in range(num_workers)]
        numbers[f"{num_workers} spawns at once (ms)"] = 1e3 * (time.perf_counter() - started_s)
        numbers |= await call_costs(first)
        deaths_ms = [await death_ms(spawn.result()) for spawn in spawns]
        numbers["kill -9 noticed (ms), median"] = statistics.median(deaths_ms)
        numbers["kill -9 noticed (ms), max"] = max(deaths_ms)
    finally:
        started_s = time.perf_counter()
        await runtime.close()
    numbers["close (ms)"] = 1e3 * (time.perf_counter() - started_s)
    return numbers


async def spawn_ms(runtime: LocalRuntime) -> float:
    started_s = time.perf_counter()
    worker = await runtime.spawn("one", PROBE)
    spent_s = time.perf_counter() - started_s
    worker.kill()
    await worker.dead
    return 1e3 * spent_s


async def call_costs(
    worker: LocalHandle, num_calls: int = sized(2000, 200), payload_bytes: int = sized(16_000_000, 1_000_000)
) -> dict[str, float]:
    latencies_us = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        await worker.call("echo", 1, timeout_s=60.0)
        latencies_us.append(1e6 * (time.perf_counter() - started_s))
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_calls):
            group.create_task(worker.call("echo", 1, timeout_s=60.0))
    concurrent_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    num_items = len([item async for item in worker.stream("count", 10 * num_calls)])
    stream_s = time.perf_counter() - started_s
    payload = bytes(payload_bytes)
    started_s = time.perf_counter()
    await worker.call("echo", payload, timeout_s=60.0)
    echo_s = time.perf_counter() - started_s
    return {
        "call (us), median": statistics.median(latencies_us),
        "call (us), p99": statistics.quantiles(latencies_us, n=100)[98],
        "concurrent calls (1/s)": num_calls / concurrent_s,
        "stream items (1/s)": num_items / stream_s,
        "payload there and back (MB/s)": 2 * payload_bytes / 1e6 / echo_s,
    }


async def death_ms(worker: LocalHandle) -> float:
    assert worker.pid is not None
    started_s = time.perf_counter()
    os.kill(worker.pid, signal.SIGKILL)
    await worker.dead
    return 1e3 * (time.perf_counter() - started_s)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=sized(8, 2))
    parser.add_argument(
        "--preload", default=sized("torch,transformers", ""), help="modules, separated by commas"
    )
    options = parser.parse_args()
    preload = tuple(filter(None, options.preload.split(",")))
    numbers = asyncio.run(measure(options.workers, preload))
    for name, value in numbers.items():
        print(f"{name:34} {value:12.2f}")
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
