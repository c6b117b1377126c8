"""Weights on their way to an engine with memory of its own: out of the slot, digested there, or refused."""

from __future__ import annotations

import asyncio
import os

import device_double
import numpy as np
import pytest
import torch
from engine_models import make_engine, make_model, make_work, prompt_of, run

from millrace.core.digest import MULTILINEAR, BlockDigest, NamedBuffer, digest_buffers, kind_of
from millrace.core.errors import TornVersionError, WeightsError
from millrace.core.types import Sampling, Staged
from millrace.devices.gpu import tensor_digests
from millrace.engines.own.torch_engine import TorchEngine
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

MODELS = [make_model("qwen3 tied", seed) for seed in range(2)]


class Host:
    """A relay, and a trainer that digests on its device."""

    def __init__(self) -> None:
        self.relay = RelayWorker("relay", 2)
        num_bytes = sum(4 * p.numel() for p in MODELS[0].parameters())
        self.endpoint = asyncio.run(self.relay.open(num_bytes))
        self.writer, self.reader = open_writer(self.endpoint), open_reader(self.endpoint)

    def write(self, version: int, model) -> str:
        named = {name: p.detach() for name, p in model.named_parameters()}
        blocks = [
            NamedBuffer(n, "float32", tuple(p.shape), p.view(-1).view(torch.uint8).numpy())
            for n, p in named.items()
        ]
        manifest = make_manifest(blocks)
        filling = self.writer.begin(version, manifest)
        for place, block in zip(self.writer.places(filling, manifest, blocks), blocks, strict=True):
            np.copyto(place, block.data)
        digests = tensor_digests(named.values())
        pieces = [
            (b.name, BlockDigest((0,) * len(b.shape), b.shape, d))
            for b, d in zip(blocks, digests, strict=True)
        ]
        return self.writer.end(filling, manifest, pieces)

    def publish(self, version: int, model) -> Staged:
        return asyncio.run(self.relay.stage(version, self.write(version, model)))


@pytest.fixture
def host():
    host = Host()
    yield host
    host.reader.close()
    host.writer.close()
    os.close(int(host.endpoint.path.rsplit("/", 1)[1]))


@pytest.fixture
def runtime(monkeypatch):
    return device_double.install(monkeypatch)


def works():
    return [make_work(i, prompt_of(i, 9), Sampling(max_tokens=12)) for i in range(4)]


def test_weights_come_straight_from_the_slot_and_are_digested_there(runtime, host, monkeypatch):
    engine = make_engine(MODELS[0])
    staged = host.publish(1, MODELS[1])
    read_back = []
    monkeypatch.setattr(TorchEngine, "buffers", lambda self: read_back.append(self))
    assert engine.stage(1, host.reader) == (staged.digest, staged.digest)
    assert kind_of(staged.digest) == MULTILINEAR
    engine.swap(1)
    assert engine.digest() == staged.digest and not read_back
    assert run(engine, works()) == run(make_engine(MODELS[1]), works())
    assert len(runtime.registered) == 1
    host.reader.close()
    assert not runtime.registered


def test_each_set_of_weights_is_digested_by_the_hash_that_it_was_published_with(runtime, host):
    engine, (first, second) = make_engine(MODELS[0]), (host.publish(1, MODELS[0]), MODELS[1])
    plain = [
        NamedBuffer(n, "float32", tuple(p.shape), p.detach().view(-1).view(torch.uint8).numpy())
        for n, p in second.named_parameters()
    ]
    engine.stage(1, host.reader)
    engine.swap(1)
    staged = asyncio.run(host.relay.stage(2, host.writer.write(2, plain)))
    assert engine.stage(2, host.reader) == (staged.digest, digest_buffers(plain))
    assert engine.digest() == first.digest
    engine.swap(2)
    assert engine.digest() == staged.digest


def test_an_engine_on_a_cpu_checks_what_a_gpu_published(host):
    engine, staged = make_engine(MODELS[0]), host.publish(1, MODELS[1])
    assert engine.stage(1, host.reader) == (staged.digest, staged.digest)
    engine.swap(1)
    assert engine.digest() == staged.digest


def test_a_version_that_is_overwritten_while_it_is_copied_is_torn(runtime, host, monkeypatch):
    engine = make_engine(MODELS[0])
    host.publish(1, MODELS[0])
    from millrace.engines.own import torch_engine as module

    honest = module.copy_to_device

    def overwritten(*arguments):
        honest(*arguments)
        host.publish(2, MODELS[1])
        host.write(3, MODELS[1])

    monkeypatch.setattr(module, "copy_to_device", overwritten)
    with pytest.raises(TornVersionError):
        engine.stage(1, host.reader)


def test_weights_of_another_model_have_no_place(runtime, host):
    engine = make_engine(make_model("gemma3"))
    host.publish(1, MODELS[0])
    with pytest.raises(WeightsError, match="not of the model that is served"):
        engine.stage(1, host.reader)


def test_a_change_in_its_memory_is_seen(runtime, host):
    engine, staged = make_engine(MODELS[0]), host.publish(1, MODELS[1])
    engine.stage(1, host.reader)
    engine.swap(1)
    engine._active.norm.view(torch.int32)[3] ^= 1
    assert engine.digest() != staged.digest
