"""A version that several processes write, each its own blocks: as one process writes it, or unreadable."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.long import long

from millrace.core.digest import BlockDigest, Filling, NamedBuffer, TensorSpec, digest_blocks, digest_buffers
from millrace.core.errors import DigestMismatchError, TornVersionError, UnknownVersionError, WeightsError
from millrace.core.types import Endpoint
from millrace.weights.manifest import exact, make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import RingWriter, open_reader, open_writer

DEADLINE_S = 120.0
SHAPES = {"rows": (7, 6), "columns": (6, 8), "fused": (8, 3), "experts": (4, 3, 2), "norm": (5,), "scale": ()}
SPAWN = multiprocessing.get_context("spawn")


def model(seed: int) -> list[NamedBuffer]:
    random = np.random.default_rng(seed)
    return [
        NamedBuffer(name, "float32", shape, random.integers(0, 256, 4 * math.prod(shape), np.uint8))
        for name, shape in SHAPES.items()
    ]


def share(tensors: Sequence[NamedBuffer], rank: int, world: int) -> list[NamedBuffer]:
    """The blocks of one rank: rows, columns, every second row, experts. The last one has the small ones."""
    blocks = []
    for tensor in tensors:
        grid = tensor.data.reshape(*tensor.shape, 4)
        if tensor.name in ("rows", "experts"):
            blocks += cut(tensor, grid, 0, *span(tensor.shape[0], rank, world))
        elif tensor.name == "columns":
            blocks += cut(tensor, grid, 1, *span(tensor.shape[1], rank, world))
        elif tensor.name == "fused":
            for row in range(rank, tensor.shape[0], world):
                blocks += cut(tensor, grid, 0, row, row + 1)
        elif rank == world - 1:
            blocks.append(tensor)
    return blocks


def span(size: int, rank: int, world: int) -> tuple[int, int]:
    step = -(-size // world)
    return min(size, rank * step), min(size, (rank + 1) * step)


def cut(tensor: NamedBuffer, grid: np.ndarray, dim: int, first: int, last: int) -> list[NamedBuffer]:
    if first == last:
        return []
    block = np.ascontiguousarray(grid[(slice(None),) * dim + (slice(first, last),)])
    start = tuple(first if each == dim else 0 for each in range(len(tensor.shape)))
    return [NamedBuffer(tensor.name, tensor.dtype, block.shape[:-1], block.reshape(-1), start)]


@dataclass
class Dying(Exception):
    """Where a rank kills itself."""

    after: int

    def __call__(self, blocks: Sequence[NamedBuffer]) -> Iterator[NamedBuffer]:
        yield from blocks[: self.after]
        os.kill(os.getpid(), signal.SIGKILL)


def rank_process(endpoint: Endpoint, rank: int, world: int, pipe: Connection) -> None:
    """A rank: does as it is told, answers with what its writer answers or raises."""
    writer = open_writer(endpoint)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        step, *values = order
        try:
            if step == "fill":
                filling, seed, kill_after = values
                blocks = share(model(seed), rank, world)
                if kill_after is not None:
                    blocks = Dying(kill_after)(blocks)
                writer.fill(filling, make_manifest(model(seed)), blocks)
                pipe.send(digest_blocks(share(model(seed), rank, world)))
            elif step == "begin":
                pipe.send(writer.begin(values[0], make_manifest(model(values[1]))))
            else:
                filling, seed, written = values
                pipe.send(writer.end(filling, make_manifest(model(seed)), written))
        except WeightsError as error:
            pipe.send(error)


class Gang:
    """Processes that publish together, told step by step."""

    def __init__(self, endpoint: Endpoint, world: int) -> None:
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=rank_process, args=(endpoint, rank, world, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self.answer(rank) == "ready"

    def answer(self, rank: int) -> object:
        assert self.pipes[rank].poll(DEADLINE_S), f"rank {rank} said nothing for {DEADLINE_S} s"
        return self.pipes[rank].recv()

    def ask(self, rank: int, *order: object) -> object:
        self.pipes[rank].send(order)
        answer = self.answer(rank)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def publish(self, version: int, seed: int) -> str:
        filling = self.ask(0, "begin", version, seed)
        for pipe in self.pipes:
            pipe.send(("fill", filling, seed, None))
        written = [piece for rank in range(len(self.pipes)) for piece in self.answer(rank)]  # type: ignore[attr-defined]
        return str(self.ask(0, "end", filling, seed, written))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


@contextmanager
def gang(endpoint: Endpoint, world: int) -> Iterator[Gang]:
    ranks = Gang(endpoint, world)
    try:
        yield ranks
    finally:
        ranks.kill()


class Host:
    def __init__(self) -> None:
        self.relay = RelayWorker("relay", 3)
        self.endpoint = asyncio.run(self.relay.open(1 << 14))
        self.reader = open_reader(self.endpoint)

    def stage(self, version: int, digest: str) -> str:
        return asyncio.run(self.relay.stage(version, digest)).digest

    def read(self, version: int) -> list[NamedBuffer]:
        into = [NamedBuffer(t.name, t.dtype, t.shape, np.zeros_like(t.data)) for t in model(0)]
        digest = self.reader.read(version, into)
        assert digest == digest_buffers(into)
        return into


@pytest.fixture
def host():
    return Host()


@pytest.mark.parametrize("world", [2, 4])
def test_what_several_processes_write_is_read_as_what_one_writes(host, world):
    with gang(host.endpoint, world) as ranks:
        for version, seed in ((1, 1), (2, 2), (3, 3), (4, 4)):
            served = host.stage(version, ranks.publish(version, seed))
            assert served == digest_buffers(model(seed))
            assert digest_buffers(host.read(version)) == served
    assert host.reader.versions() == [2, 3, 4]


@long
@pytest.mark.parametrize("moment", ["after begin", "while it fills", "before the end"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_version_whose_writer_is_killed_is_unreadable_until_new_ones_wrote_it(host, moment, victim):
    with gang(host.endpoint, 2) as ranks:
        host.stage(1, ranks.publish(1, 1))
        filling = ranks.ask(0, "begin", 2, 2)
        if moment == "while it fills":
            ranks.ask(1 - victim, "fill", filling, 2, None)
            ranks.pipes[victim].send(("fill", filling, 2, 2))
            ranks.processes[victim].join(DEADLINE_S)
        elif moment == "before the end":
            for rank in range(2):
                ranks.ask(rank, "fill", filling, 2, None)
        ranks.processes[victim].kill()
        ranks.processes[victim].join(DEADLINE_S)
        assert host.reader.versions() == [1]
        with pytest.raises(UnknownVersionError, match="version 2 is in no slot"):
            host.stage(2, digest_buffers(model(2)))
    assert digest_buffers(host.read(1)) == digest_buffers(model(1))
    with gang(host.endpoint, 2) as ranks:
        assert host.stage(2, ranks.publish(2, 2)) == digest_buffers(host.read(2)) == digest_buffers(model(2))


@pytest.mark.parametrize("step", ["fill", "end"])
def test_what_is_left_of_an_earlier_gang_is_refused_once_another_has_begun(host, step):
    with gang(host.endpoint, 2) as old, gang(host.endpoint, 2) as new:
        stale = old.ask(0, "begin", 1, 1)
        written = [piece for rank in range(2) for piece in old.ask(rank, "fill", stale, 1, None)]  # type: ignore[attr-defined]
        filling = new.ask(0, "begin", 1, 2)
        assert isinstance(stale, Filling) and isinstance(filling, Filling)
        assert (stale.slot, stale.sequence) != (filling.slot, filling.sequence)
        with pytest.raises(TornVersionError, match="Another trainer publishes into this ring"):
            old.ask(*((1, "fill", stale, 1, None) if step == "fill" else (0, "end", stale, 1, written)))
        assert host.stage(1, new.publish(1, 2)) == digest_buffers(model(2))


def write_alone(writer: RingWriter, seed: int, blocks: Sequence[NamedBuffer]) -> str:
    manifest = make_manifest(model(seed))
    filling = writer.begin(1, manifest)
    writer.fill(filling, manifest, blocks)
    return writer.end(filling, manifest, digest_blocks(blocks))


@pytest.mark.parametrize("fault", ["missing", "twice"])
def test_blocks_that_are_not_exactly_the_weights_are_no_version(host, fault):
    blocks = share(model(1), 0, 2) + share(model(1), 1, 2)
    wrong = blocks[1:] if fault == "missing" else [*blocks, blocks[0]]
    with pytest.raises(WeightsError, match=r"version 1 is not whole.*`rows` \[7, 6\] \(1 of 6 tensors\)"):
        write_alone(open_writer(host.endpoint), 1, wrong)
    assert host.reader.versions() == []


def test_a_piece_that_begins_before_its_tensor_is_no_part_of_it():
    def cut(start: int, size: int) -> bool:
        return exact(TensorSpec("rows", "float32", (4,), 0, 16, (BlockDigest((start,), (size,), ""),)))

    assert cut(0, 4) and not cut(-1, 5) and not cut(0, 5)


def test_a_change_in_the_slot_of_any_block_is_found_when_it_is_staged(host):
    blocks = share(model(1), 0, 2) + share(model(1), 1, 2)
    digest = write_alone(open_writer(host.endpoint), 1, blocks)
    memory = host.relay._memory
    slot = next(slot for slot in range(memory.slots) if memory.written(slot))
    for spec in make_manifest(model(1)):
        for at in range(spec.offset, spec.offset + spec.num_bytes, 7):
            memory.data[slot][at] ^= 1
            with pytest.raises(DigestMismatchError):
                host.stage(1, digest)
            memory.data[slot][at] ^= 1
    assert host.stage(1, digest) == host.stage(1, digest) == digest_buffers(model(1))


BIG = [TensorSpec("w", "float32", (64, 1 << 18), 0, 64 << 20)]


def write_share(endpoint: Endpoint, rank: int, world: int, pipe: Connection) -> None:
    writer, rows = open_writer(endpoint), 64 // world
    data = np.full(rows << 20, rank, np.uint8)
    filling = pipe.recv()
    before = anonymous_bytes()
    blocks = [NamedBuffer("w", "float32", (rows, 1 << 18), data, (rows * rank, 0))]
    writer.fill(filling, BIG, blocks)
    pipe.send((digest_blocks(blocks), anonymous_bytes() - before))


def anonymous_bytes() -> int:
    """The most private memory that this process has had: mapped pages of the ring are the relay's."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * (int(fields["VmHWM"].split()[0]) - int(fields["RssShmem"].split()[0]))


def test_a_rank_writes_without_memory_of_its_own(host):
    relay = RelayWorker("relay", 2)
    endpoint = asyncio.run(relay.open(64 << 20))
    writer, world, pipes = open_writer(endpoint), 4, []
    filling = writer.begin(1, BIG)
    for rank in range(world):
        ours, theirs = SPAWN.Pipe()
        SPAWN.Process(target=write_share, args=(endpoint, rank, world, theirs), daemon=True).start()
        ours.send(filling)
        pipes.append(ours)
    assert all(pipe.poll(DEADLINE_S) for pipe in pipes)
    answers = [pipe.recv() for pipe in pipes]
    asyncio.run(
        relay.stage(1, writer.end(filling, BIG, [piece for written, _ in answers for piece in written]))
    )
    assert max(grown for _, grown in answers) < 4 << 20, [grown for _, grown in answers]
