"""How long publishing stalls the trainer, and a pull takes, against a plain copy of the same bytes.

    python benchmarks/weights.py [--megabytes 100] [--tensors 200] [--repeats 7] [--json]

`stall` is what the trainer waits for: writing one version into the relay's slots. `stage` is the relay
verifying it, `pull` a reader copying it out, `verify` the digest a replica takes of what it serves: none
of them stalls the trainer. Medians; ratios are to `memcpy`, warm memory to warm memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.weights.relay import Relay
from millrace.weights.ring import open_reader, open_writer


def make_model(megabytes: int, tensors: int) -> list[NamedBuffer]:
    """Equal bfloat16 tensors of random bytes."""
    random = np.random.default_rng(0)
    elements = megabytes * 2**20 // tensors // 2
    return [
        NamedBuffer(
            f"layers.{i}.weight", "bfloat16", (elements,), random.integers(0, 256, 2 * elements, np.uint8)
        )
        for i in range(tensors)
    ]


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def copy(source: list[NamedBuffer], target: list[NamedBuffer]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        np.copyto(theirs.data, ours.data)


def measure(megabytes: int, tensors: int, repeats: int) -> dict[str, float]:
    """Medians in seconds, and ratios to memcpy."""
    source, standby = make_model(megabytes, tensors), make_model(megabytes, tensors)
    relay = Relay("relay", 3)
    started = time.perf_counter()
    endpoint = asyncio.run(relay.open(sum(len(tensor.data) for tensor in source)))
    opened_s = time.perf_counter() - started
    writer, reader = open_writer(endpoint), open_reader(endpoint)
    digest = digest_buffers(source)
    taken: dict[str, list[float]] = {name: [] for name in ("memcpy", "stall", "stage", "pull", "verify")}
    for version in range(1, repeats + 4):  # the first three fill every slot once
        taken["memcpy"].append(seconds(lambda: copy(source, standby)))
        taken["stall"].append(seconds(lambda v=version: writer.write(v, source)))  # type: ignore[misc]
        taken["stage"].append(seconds(lambda v=version: asyncio.run(relay.stage(v, digest))))  # type: ignore[misc]
        taken["pull"].append(seconds(lambda v=version: reader.read(v, standby)))  # type: ignore[misc]
        taken["verify"].append(seconds(lambda: digest_buffers(standby)))
    medians = {name: statistics.median(values[3:]) for name, values in taken.items()}
    return {
        "megabytes": megabytes,
        "open_s": opened_s,
        **{f"{name}_s": value for name, value in medians.items()},
        "stall_first_s": taken["stall"][0],
        "pull_first_s": taken["pull"][0],
        "stall_over_memcpy": medians["stall"] / medians["memcpy"],
        "pull_over_memcpy": medians["pull"] / medians["memcpy"],
        "memcpy_gb_per_s": megabytes * 2**20 / medians["memcpy"] / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    result = measure(options.megabytes, options.tensors, options.repeats)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:20} {value:10.4f}")


if __name__ == "__main__":
    main()
