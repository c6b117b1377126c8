"""What publishing stops each rank of a trainer for, against a plain copy of the rank's own bytes.

    python benchmarks/publish.py [--megabytes 200] [--ranks 1 2 4] [--rounds 9] [--json]

Each rank is a process with its share of 200 bfloat16 matrices: rows, as sharding leaves them, or columns, as
tensor parallelism leaves some. In a round all ranks copy their blocks between warm pages, then all publish,
and this process stages the version. The least of all rounds, of the slowest rank.

stall   what a rank waits for: copies into the slot, and one exchange of small messages
digest  from there until the version is whole: digests, and three exchanges more. A trainer goes on meanwhile
copy    the same blocks, copied into memory of the rank's own
cpu     the same in CPU seconds of both threads, which tell more on a machine that does other work
stage   the relay digests the slot, by blocks and by tensors, and makes it readable
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import parser_of, report, say, sized, table

from millrace.core.types import Endpoint
from millrace.weights.relay import RelayWorker

TENSORS, WIDTH = 200, 1024
DEADLINE_S = 300.0


def weights(rows: int, dim: int, ranks: Any) -> dict[str, Any]:
    """As this rank holds them: no rank makes a whole one."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    made: dict[str, Any] = {}
    for index in range(TENSORS):
        shape = [rows, WIDTH]
        shape[dim] //= ranks.world
        values = torch.randn(shape).bfloat16()
        placed = (
            values if ranks.world == 1 else DTensor.from_local(values, ranks.weights_mesh, [Shard(dim)] * 2)
        )
        made[f"layers.{index}.weight"] = placed
    return made


def one_rank(
    endpoint: Endpoint, rank: int, world: int, rows: int, dim: int, meet: str, pipe: Connection
) -> None:
    import torch

    from millrace.trainer.publish.publisher import PublishBuffers, Publisher
    from millrace.trainer.ranks.mesh import Ranks
    from millrace.weights.ring import open_writer

    ranks = Ranks(shard=world, rank=rank)
    ranks.join(meet, torch.device("cpu"))
    torch.manual_seed(rank)
    held = weights(rows, dim, ranks)
    unused = torch.optim.SGD([torch.zeros(1)])
    publisher = Publisher(PublishBuffers(held, torch.bfloat16), unused, ranks)
    writer = open_writer(endpoint)
    sources = [buffer.data for buffer in publisher.buffers.fill()]
    targets = [np.ones_like(source) for source in sources]
    pipe.send(sum(source.nbytes for source in sources))
    while (version := pipe.recv()) is not None:
        ranks.gather(None)
        began = now()
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)
        copied = now() - began
        ranks.gather(None)
        started = now()
        publisher.begin(lambda: writer, endpoint, version)
        stalled = now() - started
        published = publisher.published()
        pipe.send((published.digest, *copied, *stalled, published.digest_s))
    os._exit(0)  # gloo's threads outlive what they talk about


def now() -> Any:
    """Seconds, and CPU seconds of this process: all its threads."""
    return np.array([time.perf_counter(), time.process_time()])


def measure(world: int, dim: int, megabytes: int, rounds: int) -> dict[str, float]:
    rows = megabytes * 10**6 // (TENSORS * WIDTH * 2) // 8 * 8
    relay, context, pipes = RelayWorker("relay", 3), multiprocessing.get_context("spawn"), []
    endpoint = asyncio.run(relay.open(TENSORS * rows * WIDTH * 2))
    with tempfile.TemporaryDirectory() as place:
        for rank in range(world):
            ours, theirs = context.Pipe()
            told = (endpoint, rank, world, rows, dim, f"file://{Path(place) / 'meet'}", theirs)
            context.Process(target=one_rank, args=told, daemon=True).start()
            pipes.append(ours)
        share = max(answer(pipe) for pipe in pipes)
        taken = [one_round(relay, version, pipes) for version in range(1, rounds + 4)][3:]
        for pipe in pipes:
            pipe.send(None)
    least = {name: min(one[name] for one in taken) for name in taken[0]}
    over = {f"stall_over_copy{kind}": least[f"stall{kind}"] / least[f"copy{kind}"] for kind in ("", "_cpu")}
    return {"share_mb": share / 1e6, **least, **over}


def one_round(relay: RelayWorker, version: int, pipes: list[Connection]) -> dict[str, float]:
    for pipe in pipes:
        pipe.send(version)
    answers = [answer(pipe) for pipe in pipes]
    began = time.perf_counter()
    asyncio.run(relay.stage(version, answers[0][0]))
    stage_s = time.perf_counter() - began
    names = ("copy", "copy_cpu", "stall", "stall_cpu", "digest")
    slowest = {name: float(max(one[index] for one in answers)) for index, name in enumerate(names, 1)}
    return {**slowest, "stage": stage_s}


def answer(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), f"a rank said nothing for {DEADLINE_S} s"
    return pipe.recv()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=sized(200, 8))
    parser.add_argument("--ranks", type=int, nargs="+", default=sized([1, 2, 4], [2]))
    parser.add_argument("--rounds", type=int, default=sized(9, 1))
    options = parser.parse_args()
    rows = {}
    for world in options.ranks:
        for dim, blocks in enumerate(("rows", "columns")):
            say(f"{world} ranks, {blocks}")
            rows[f"{world}, {blocks}"] = measure(world, dim, options.megabytes, options.rounds)
    table(rows, first="ranks")
    worst = max(row["stall_over_copy"] for name, row in rows.items() if "rows" in name)
    report({"publish_over_copy": worst, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
