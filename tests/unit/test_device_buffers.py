"""Weights that a device copies into a slot and digests by itself, on a CPU in its place."""

from __future__ import annotations

import asyncio
import os

import device_double
import numpy as np
import pytest
import torch
from trainer_doubles import tiny_model

from millrace.core.digest import MULTILINEAR, NamedBuffer, digest_buffers, kind_of
from millrace.core.errors import DigestMismatchError, TornVersionError
from millrace.trainer.model import named_weights
from millrace.trainer.publish import publisher
from millrace.trainer.publish.publisher import DeviceBuffers, PublishBuffers, Publisher, buffers_of
from millrace.trainer.ranks.blocks import OwnedBlock
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def runtime(monkeypatch):
    return device_double.runtime(monkeypatch)


class Host:
    def __init__(self, num_bytes: int) -> None:
        self.relay = RelayWorker("relay", 2)
        self.endpoint = asyncio.run(self.relay.open(num_bytes))
        self.writer, self.reader = open_writer(self.endpoint), open_reader(self.endpoint)

    def publish(self, version: int, buffers: DeviceBuffers) -> str:
        filling = self.writer.begin(version, buffers.manifest)
        buffers.copy(self.writer, filling)
        return self.writer.end(filling, buffers.manifest, buffers.block_digests())

    def stage(self, version: int, digest: str) -> str:
        return asyncio.run(self.relay.stage(version, digest)).digest

    def read(self, version: int, like: list[NamedBuffer]) -> tuple[str, list[NamedBuffer]]:
        into = [NamedBuffer(b.name, b.dtype, b.shape, np.zeros_like(b.data)) for b in like]
        return self.reader.read(version, into), into


@pytest.fixture
def host(runtime):
    made = []

    def make(buffers: DeviceBuffers) -> Host:
        made.append(Host(buffers.weights_bytes))
        return made[-1]

    yield make
    for one in made:
        one.writer.close()
        one.reader.close()
        os.close(int(one.endpoint.path.rsplit("/", 1)[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replica_gets_what_the_host_would_have_published(dtype, host, runtime):
    weights = named_weights(tiny_model())
    buffers, plain = DeviceBuffers(weights, dtype, CPU), PublishBuffers(weights, dtype)
    assert (buffers.manifest, buffers.weights_bytes) == (plain.manifest, plain.weights_bytes)
    there = host(buffers)
    digest = there.publish(1, buffers)
    expected = plain.fill()
    found, into = there.read(1, expected) if there.stage(1, digest) == digest else ("", [])
    assert found == digest == buffers.digest() == digest_buffers(into, MULTILINEAR)
    assert kind_of(digest) == MULTILINEAR
    assert digest_buffers(into) == digest_buffers(expected)
    assert [flags for _, flags in runtime.registered.values()] == [0]


def test_the_next_version_has_the_next_weights(host):
    model = tiny_model()
    buffers = DeviceBuffers(named_weights(model), torch.bfloat16, CPU)
    there = host(buffers)
    digests = []
    for version in (1, 2):
        with torch.no_grad():
            next(model.parameters()).add_(1)
        digests.append(there.publish(version, buffers))
        assert there.stage(version, digests[-1]) == digests[-1]
    assert digests[0] != digests[1]


def test_blocks_of_rows_and_of_columns_go_to_their_places(host, monkeypatch):
    whole = {"wide": torch.randn(6, 10), "long": torch.randn(300, 7), "none": torch.zeros(0, 3)}

    def divided(weights):
        for name, weight in weights.items():
            rows, columns = (size // 3 for size in weight.shape)
            for r in (slice(0, rows), slice(rows, None)):
                for c in (slice(0, columns), slice(columns, None)):
                    block = weight[r, c]
                    if block.numel():
                        yield OwnedBlock(name, tuple(weight.shape), (r.start, c.start), block)

    expected = PublishBuffers(whole, torch.bfloat16).fill()
    monkeypatch.setattr(publisher, "owned_blocks", lambda weights: list(divided(weights)))
    buffers = DeviceBuffers(whole, torch.bfloat16, CPU)
    there = host(buffers)
    by_pieces = there.publish(1, buffers)
    staged = there.stage(1, by_pieces)
    assert kind_of(by_pieces) == kind_of(staged) == MULTILINEAR and by_pieces != staged
    named = {buffer.name: buffer for buffer in expected}
    like = [named.get(n) or NamedBuffer(n, "bfloat16", (0, 3), np.empty(0, np.uint8)) for n in whole]
    found, into = there.read(1, like)
    assert found == staged == digest_buffers(into, MULTILINEAR) == digest_buffers(like, MULTILINEAR)


def test_bytes_that_change_on_their_way_are_refused(host):
    buffers = DeviceBuffers(named_weights(tiny_model()), torch.float32, CPU)
    there = host(buffers)
    digest = there.publish(1, buffers)
    there.writer._memory.data[0][1234] ^= 4
    with pytest.raises(DigestMismatchError):
        there.stage(1, digest)


def test_a_slot_that_another_trainer_took_is_left_alone(host):
    buffers = DeviceBuffers(named_weights(tiny_model()), torch.float32, CPU)
    there = host(buffers)
    filling = there.writer.begin(1, buffers.manifest)
    there.publish(1, buffers)
    with pytest.raises(TornVersionError):
        buffers.copy(there.writer, filling)


def test_a_publisher_lets_the_device_publish_and_finds_what_changed_in_its_memory(host, monkeypatch):
    monkeypatch.setattr(publisher, "has_own_memory", lambda _: True)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publishing = Publisher(buffers_of(named_weights(model), torch.bfloat16), optimizer)
    assert isinstance(publishing.buffers, DeviceBuffers)
    there = host(publishing.buffers)
    digests = []
    for version in (0, 1):
        publishing.begin(lambda: there.writer, there.endpoint, version)
        sum(parameter.sum() for parameter in model.parameters()).backward()
        published = publishing.result()
        assert there.stage(version, published.digest) == published.digest
        digests.append(published.digest)
        publishing.refuse_changed(version)
        if version == 0:
            optimizer.step()
    assert digests[0] != digests[1]
    with torch.no_grad():
        next(model.parameters())[0] += 0.5
    with pytest.raises(DigestMismatchError, match="changed in memory"):
        publishing.refuse_changed(1)
