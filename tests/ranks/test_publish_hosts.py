"""Ranks on two hosts publish into a relay of each, which get from each other what they lack."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch
from test_publish_ranks import DEADLINE_S, as_bytes, divided, model
from tests.long import long

from millrace.core.digest import digest_buffers
from millrace.core.types import Endpoint, Published, Staged
from millrace.trainer.publish.publisher import PublishBuffers, Publisher, buffers_of
from millrace.trainer.ranks.mesh import Ranks
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

SPAWN = multiprocessing.get_context("spawn")


def one_rank(rank: int, rendezvous: str, pipe: Connection) -> None:
    """Publishes the version that it is told, to the endpoint of its host."""
    ranks = Ranks(shard=2, tensor=2, rank=rank, hosts=2)
    ranks.join(rendezvous, torch.device("cpu"), "127.0.0.1")
    trained = divided(ranks)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    publisher = Publisher(buffers_of(trained.state_dict(), torch.bfloat16), optimizer, ranks)
    pipe.send(os.environ["GLOO_SOCKET_IFNAME"])
    while (order := pipe.recv()) is not None:
        version, endpoints = order
        endpoint = endpoints[ranks.host]
        publisher.begin(lambda endpoint=endpoint: open_writer(endpoint), endpoint, version)
        pipe.send(publisher.result())
    os._exit(0)


class Trainer:
    """Four ranks on two hosts."""

    def __init__(self, rendezvous: str) -> None:
        self._pipes = []
        for rank in range(4):
            ours, theirs = SPAWN.Pipe()
            SPAWN.Process(target=one_rank, args=(rank, rendezvous, theirs), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        assert self._answers() == ["lo"] * 4

    def publish(self, version: int, relays: list[Host]) -> Published:
        for pipe in self._pipes:
            pipe.send((version, [relay.endpoint for relay in relays]))
        published = self._answers()
        assert len({one.digest for one in published}) == 1
        return published[0]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def _answers(self) -> list[object]:
        assert all(pipe.poll(DEADLINE_S) for pipe in self._pipes)
        return [pipe.recv() for pipe in self._pipes]


class Host:
    def __init__(self) -> None:
        self.relay = RelayWorker("relay", 3, address="127.0.0.1", secret="of this test")
        slot_bytes = PublishBuffers(model().state_dict(), torch.bfloat16).weights_bytes
        self.endpoint: Endpoint = asyncio.run(self.relay.open(slot_bytes))

    @property
    def sequences(self) -> list[int]:
        memory = self.relay._memory
        return [memory.sequence(slot) for slot in range(memory.slots)]

    def read(self, version: int) -> str:
        zeros = {
            name: torch.zeros(whole.shape, dtype=torch.bfloat16)
            for name, whole in model().state_dict().items()
        }
        into = as_bytes(zeros)
        assert open_reader(self.endpoint).read(version, into) == digest_buffers(into)
        return digest_buffers(into)


def exchange(published: Published, hosts: list[Host]) -> list[Staged]:
    """Each relay gets from the other one."""

    async def both() -> list[Staged]:
        version, digest, (a, b) = published.version, published.digest, hosts
        return await asyncio.gather(
            a.relay.fetch(version, digest, [b.endpoint.address]),
            b.relay.fetch(version, digest, [a.endpoint.address]),
        )

    return asyncio.run(both())


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = Trainer(f"file://{tmp_path_factory.mktemp('ranks') / 'meet'}")
    yield trainer
    trainer.end()


@long
def test_each_host_gets_from_the_other_what_its_own_ranks_did_not_write(trainer):
    hosts = [Host(), Host()]
    published = trainer.publish(0, hosts)
    whole = digest_buffers(as_bytes({n: w.bfloat16() for n, w in model().state_dict().items()}))
    got = exchange(published, hosts)
    assert {staged.digest for staged in got} == {whole} == {host.read(0) for host in hosts}
    assert sum(staged.decoded_bytes for staged in got) == published.weights_bytes
    assert all(0 < staged.decoded_bytes < published.weights_bytes for staged in got)


@long
def test_ranks_of_a_host_with_a_new_relay_write_again_and_those_of_the_other_do_not(trainer):
    first, second, new = Host(), Host(), Host()
    published = trainer.publish(1, [first, second])
    exchange(published, [first, second])
    before = first.sequences
    again = trainer.publish(1, [first, new])
    assert again.digest == published.digest and first.sequences == before
    assert new.read(1) == first.read(1) if exchange(again, [first, new]) else None
    trainer.publish(1, [first, new])
    assert first.sequences == before, "a repeat writes nothing"
