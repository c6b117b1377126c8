"""A trainer of several ranks, against one process and against the memory that it copies.

    python benchmarks/ranks.py [--ranks 2] [--json]

Each rank is a process with the trainer's role and a Qwen3 of 108 M parameters. Alone and divided, it
accumulates the gradient of a batch, publishes and exports. Times are medians of fifteen. The memory of steps
and of `--dry-run` is measured by `rank_memory.py`, in processes of its own.

gradient_error_max      largest |g - g1| / |g1| of a tensor's gradient (norms), g1 that of one process
rank_peak_over_share    a rank's peak over its share of the states (16 bytes a parameter) and what one process
                        holds beside its states
publish_over_copy       time for which publishing stops a rank, over a copy of its own bytes. The ranks copy
                        at the same moment, as when they publish: they share the memory's bandwidth
export_peak_over_share  a rank's peak during an export, over what it held before
dry_run_error           largest |said - measured| / measured of what `--dry-run` says of a rank's peak
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import parser_of, report, say, table
from memory import imports, resident
from rank_memory import configuration, make_batch, make_model, measure, run_ranks, said

COPIES = 15
SLOT_SPARE = 1 << 20


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def measured(config: dict[str, Any], directory: Path, kept: Path, endpoint: Any) -> dict[str, float]:
    from millrace.trainer.role import TorchTrainer

    before = resident("VmRSS")
    role = TorchTrainer(config, str(directory / "run"), "millrace.weights.ring:open_writer", "cpu")
    await role.load(None)
    found = {"gradient_error": gradient_error(role._ready(), kept)}
    times = await publish_times(role, endpoint)
    found |= {name: median(one[name] for one in times) for name in times[0]}
    held = resident("VmRSS") - before
    reset_peak()
    await role.export(str(directory / "exported"))
    found["export_over_share"] = (resident("VmHWM") - before) / held
    return found


def gradient_error(trainer: Any, kept: Path) -> float:
    """The worst of all tensors. One process alone writes its gradient to `kept`, and has no error."""
    from safetensors.torch import safe_open, save_file

    from millrace.trainer.ranks.blocks import parts

    trainer.accumulate(make_batch(0))
    gradients = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    errors = {}
    if trainer.ranks.world == 1:
        save_file(gradients, kept)
    else:
        with safe_open(kept, framework="pt") as file:
            for part in parts(gradients):
                ends = (start + size for start, size in zip(part.start, part.block.shape, strict=True))
                stored = file.get_slice(part.name)[tuple(map(slice, part.start, ends))]
                error = (part.block - stored).norm().item() / file.get_tensor(part.name).norm().item()
                errors[part.name] = math.hypot(errors.get(part.name, 0.0), error)
    trainer.optimizer.zero_grad(set_to_none=False)
    each = trainer.ranks.gather(errors)
    return max((math.hypot(*(one.get(name, 0.0) for one in each)) for name in gradients), default=0.0)


async def publish_times(role: Any, endpoint: Any) -> list[dict[str, float]]:
    """Of versions that are published, and in turns of copies of this rank's bytes into memory that is warm.
    All ranks begin together, as after a step."""
    import numpy as np

    sources = [buffer.data for buffer in role._publisher.buffers.fill()]
    targets = [np.ones_like(source) for source in sources]
    times = []
    for _ in range(COPIES + 1):
        role._ranks.gather(None)
        await role.publish(endpoint)
        published = await role.published()
        role._publisher._begun = endpoint, -1  # a repeat writes nothing
        role._ranks.gather(None)
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        copy_s = time.perf_counter() - began
        times.append({"stall_s": published.stall_s, "digest_s": published.digest_s, "copy_s": copy_s})
    return times[1:]  # the first opens the ring


def one_rank(config: dict[str, Any], directory: Path, kept: Path, endpoint: str) -> None:
    from millrace.core.types import Endpoint

    imports()
    where = msgspec.json.decode(endpoint, type=Endpoint)
    print(json.dumps(asyncio.run(measured(config, directory, kept, where))), flush=True)
    os._exit(0)  # gloo's threads outlive what they talk about


def compare(ranks: int) -> dict[str, Any]:
    from millrace.weights.relay import RelayWorker

    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place))
        for count in (1, ranks):
            say(f"{count} ranks")
            config = configuration(Path(place), "plain", count)
            _, parameters = said(config)
            relay = RelayWorker("relay", slots=2)
            endpoint = asyncio.run(relay.open(4 * parameters + SLOT_SPARE))
            kept = str(Path(place) / "gradient.safetensors")
            told = run_ranks(__file__, config, count, kept, msgspec.json.encode(endpoint).decode())
            each = [json.loads(line) for line in told]
            worst = {name: max(one[name] for one in each) for name in each[0]}
            rows[str(count)] = {
                **worst,
                "publish_over_copy": max(one["stall_s"] / one["copy_s"] for one in each),
            }
    memory, divided = measure(["plain"], [1, ranks]), rows[str(ranks)]
    return {
        "rows": rows,
        "memory": memory["rows"],
        "gradient_error_max": divided["gradient_error"],
        "rank_peak_over_share": memory["rank_peak_over_share"],
        "publish_over_copy": divided["publish_over_copy"],
        "export_peak_over_share": divided["export_over_share"],
        "dry_run_error": memory["dry_run_error"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        config, directory, kept, endpoint = options.rank
        one_rank(json.loads(config), Path(directory), Path(kept), endpoint)
        return
    result = compare(options.ranks)
    table(result["rows"], first="ranks")
    table(result["memory"])
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
