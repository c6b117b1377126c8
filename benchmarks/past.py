"""What it costs a relay to keep older versions as deltas: memory, time, and how many there are.

    python benchmarks/past.py [--json] [--mb 400] [--rounds 12]

A model of bfloat16 noise, of which a share of the elements changes by a unit in each version.

held                versions that a reader can have, two of them whole
memory_over_version bytes of the relay's memory files (slots and deltas, as the kernel counts their pages)
                    over those of one version; at most 2.5
keep_gbit_per_s     bits of a version over the CPU time of its delta
rebuild_s           a reader gets the oldest; copy_s: the newest
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np
from common import median, parser_of, report, sized, table

from millrace.core.digest import NamedBuffer
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

SHARES = (1e-4, 1e-3, 1e-2, 0.1)


def measure(num_bytes: int, share: float, rounds: int) -> dict[str, float]:
    relay = RelayWorker("relay", 2, versions=64)
    endpoint = asyncio.run(relay.open(num_bytes))
    writer, reader, past = open_writer(endpoint), open_reader(endpoint), relay._past
    assert past is not None
    random = np.random.default_rng(0)
    data = random.integers(0, 60_000, num_bytes // 2, dtype=np.uint16)
    keeps = []
    for version in range(rounds):
        places = random.integers(0, len(data), int(share * len(data)))
        data[places] += 1
        digest = writer.write(version, [NamedBuffer("all", "bfloat16", data.shape, data.view(np.uint8))])
        past.look = lambda: None  # type: ignore[method-assign]
        asyncio.run(relay.stage(version, digest))
        began_s = time.thread_time()
        past.keep()
        keeps.append(time.thread_time() - began_s)
    ring = os.stat(endpoint.path).st_blocks * 512
    held = reader.held()
    into = [NamedBuffer("all", "bfloat16", data.shape, np.empty(num_bytes, np.uint8))]
    found = {
        "held": len(held),
        "memory_over_version": (ring + past.num_bytes) / num_bytes,
        "keep_gbit_per_s": 8e-9 * num_bytes / median(keeps[1:]),
        "rebuild_s": _timed(reader, held[0], into),
        "copy_s": _timed(reader, held[-1], into),
    }
    past.forget(0)
    os.close(int(endpoint.path.rsplit("/", 1)[1]))
    return found


def _timed(reader: Any, version: int, into: list[NamedBuffer]) -> float:
    began_s = time.perf_counter()
    reader.read(version, into)
    return time.perf_counter() - began_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mb", type=int, default=sized(400, 1))
    parser.add_argument("--rounds", type=int, default=sized(12, 4))
    options = parser.parse_args()
    found = {f"{share:g}": measure(options.mb << 20, share, options.rounds) for share in SHARES}
    table(found, first="share")
    most = max(one["memory_over_version"] for one in found.values())
    report({"memory_over_version": most, "shares": found}, as_json=options.json)


if __name__ == "__main__":
    main()
