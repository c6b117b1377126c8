"""What moving a version costs, against a plain copy of the same bytes: trainer, relay, replicas.

    python benchmarks/weights.py [--megabytes 100 1000] [--replicas 1 2 4 8] [--rounds 15] [--json]

Trainer and relay are this process, every replica one of its own, with a ring of three slots between them.
A version is written, staged, pulled by all replicas at once, and digested by them. The copy that each
figure is compared with is made by the same process, in the same round, between pages as warm as those.

stall    what the trainer waits for: its tensors copied into a slot
digest   taken of the tensors, while the trainer goes on
copied   the copy alone
stage    the relay digests the slot and makes it readable
pull     a replica copies the slot into its standby weights, while it would decode; the slowest one
verify   the digest that a replica takes of what it then serves
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
from common import median, parser_of, report, say, sized, table

from millrace.core.digest import NamedBuffer, digest_blocks, digest_buffers
from millrace.core.types import Endpoint
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import RingWriter, open_reader, open_writer

TENSORS = 200
DEADLINE_S = 120.0

Seconds = dict[str, float]


def make_model(megabytes: int) -> list[NamedBuffer]:
    """Equal bfloat16 tensors of random bytes, on pages of their own."""
    random = np.random.default_rng(0)
    size = megabytes * 10**6 // TENSORS // 2 * 2
    return [
        NamedBuffer(f"layers.{i}.weight", "bfloat16", (size // 2,), random.integers(0, 256, size, np.uint8))
        for i in range(TENSORS)
    ]


def copy(source: Sequence[NamedBuffer], target: Sequence[NamedBuffer]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        np.copyto(theirs.data, ours.data)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def serve(endpoint: Endpoint, megabytes: int, pipe: Connection) -> None:
    """A replica: for each version received, pull it, digest it, and say what that took."""
    reader, standby, private = open_reader(endpoint), make_model(megabytes), make_model(megabytes)
    pipe.send(None)
    while (version := pipe.recv()) is not None:
        pull_s = seconds(lambda: reader.read(version, standby))
        verify_s = seconds(lambda: digest_buffers(standby))
        pipe.send({"pull": pull_s, "verify": verify_s})
        pipe.recv()  # the others are done too: nothing disturbs the copy
        pipe.send(seconds(lambda: copy(private, standby)))


@contextmanager
def replicas(count: int, endpoint: Endpoint, megabytes: int) -> Iterator[list[Connection]]:
    """Pipes to `count` replicas that are ready."""
    context, pipes = multiprocessing.get_context("spawn"), []
    for _ in range(count):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(endpoint, megabytes, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        answer(pipe)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)


def answer(pipe: Connection) -> Seconds:
    assert pipe.poll(DEADLINE_S), f"a replica said nothing for {DEADLINE_S} s"
    return pipe.recv()


class Trainer:
    """The writing side: a model, and a private copy of it to compare with."""

    def __init__(self, relay: RelayWorker, writer: RingWriter, megabytes: int) -> None:
        self._relay, self._writer = relay, writer
        self._tensors, self._target = make_model(megabytes), make_model(megabytes)
        self.version = 0

    def publish(self) -> Seconds:
        self.version += 1
        memcpy_s = seconds(lambda: copy(self._tensors, self._target))
        started, manifest = time.perf_counter(), make_manifest(self._tensors)
        filling = self._writer.begin(self.version, manifest)
        self._writer.fill(filling, manifest, self._tensors)
        stalled = time.perf_counter()
        published = self._writer.end(filling, manifest, digest_blocks(self._tensors))
        digest_s = time.perf_counter() - stalled
        stage_s = seconds(lambda: asyncio.run(self._relay.stage(self.version, published)))
        return {"memcpy": memcpy_s, "stall": stalled - started, "digest": digest_s, "stage": stage_s}


def one_round(trainer: Trainer, pipes: Sequence[Connection]) -> Seconds:
    """Publish a version and let everybody pull it at once; then everybody copies, one by one."""
    taken = trainer.publish()
    for pipe in pipes:
        pipe.send(trainer.version)
    pulled = [answer(pipe) for pipe in pipes]
    copies = []
    for pipe in pipes:
        pipe.send(True)
        copies.append(float(answer(pipe)))  # type: ignore[arg-type]
    slowest = {name: max(one[name] for one in pulled) for name in ("pull", "verify")}
    return {**taken, **slowest, "pull_memcpy": median(copies)}


def measure(megabytes: int, counts: Sequence[int], rounds: int) -> dict[int, Seconds]:
    """Medians by number of replicas, rounds interleaved, after every slot was filled once."""
    relay = RelayWorker("relay", 3)
    endpoint = asyncio.run(relay.open(megabytes * 10**6))
    trainer = Trainer(relay, open_writer(endpoint), megabytes)
    taken: dict[int, list[Seconds]] = {count: [] for count in counts}
    with replicas(max(counts), endpoint, megabytes) as pipes:
        for _ in range(3):
            one_round(trainer, pipes)
        for index in range(rounds):
            say(f"{megabytes} MB, round {index + 1} of {rounds}")
            for count in counts:
                taken[count].append(one_round(trainer, pipes[:count]))
    return {
        count: {name: median([one[name] for one in all_rounds]) for name in all_rounds[0]}
        | {
            "stall_over_memcpy": median([one["stall"] / one["memcpy"] for one in all_rounds]),
            "pull_over_memcpy": median([one["pull"] / one["pull_memcpy"] for one in all_rounds]),
        }
        for count, all_rounds in taken.items()
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=sized([100, 1000], [2]))
    parser.add_argument("--replicas", type=int, nargs="+", default=sized([1, 2, 4, 8], [1, 2]))
    parser.add_argument("--rounds", type=int, default=sized(15, 1))
    options = parser.parse_args()
    rows: dict[str, Seconds] = {}
    for megabytes in options.megabytes:
        # Every replica holds two copies of the version here: many only of a small one.
        counts = [count for count in options.replicas if count == 1 or count * megabytes <= 1000]
        for count, row in measure(megabytes, counts, options.rounds).items():
            rows[f"{megabytes} MB, {count} replicas"] = row
    table(rows)
    first, one = options.megabytes[0], min(options.replicas)
    alone, crowd = (
        rows[f"{first} MB, {one} replicas"],
        rows[f"{first} MB, {max(counts_of(rows, first))} replicas"],
    )
    report(
        {
            "stall_over_memcpy": alone["stall_over_memcpy"],
            "pull_over_memcpy": alone["pull_over_memcpy"],
            "stall8_over_stall1": crowd["stall"] / alone["stall"],
            "memcpy_gb_per_s": first / 1000 / alone["memcpy"],
            "rows": rows,
        },
        as_json=options.json,
    )


def counts_of(rows: dict[str, Seconds], megabytes: int) -> list[int]:
    prefix = f"{megabytes} MB, "
    return [int(name.removeprefix(prefix).split()[0]) for name in rows if name.startswith(prefix)]


if __name__ == "__main__":
    main()
