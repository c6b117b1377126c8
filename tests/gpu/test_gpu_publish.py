"""Weights from one GPU to another through the ring: registered memory, digests taken there."""

from __future__ import annotations

import asyncio
import os
import warnings

import multilinear_jax
import numpy as np
import pytest
import torch
from engine_models import make_engine, make_model, make_work, prompt_of, run

from millrace.core.digest import MULTILINEAR, kind_of, tensor_digest
from millrace.core.multilinear import BLOCK_BYTES
from millrace.core.types import Sampling
from millrace.devices.gpu import BAND, tensor_digests
from millrace.devices.pinned import as_tensor, copy_from_device, pinned
from millrace.engines.own.torch_engine import TorchEngine
from millrace.trainer.publish.publisher import DeviceBuffers
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

pytestmark = pytest.mark.gpu
SIZES = [0, 1, 7, 8, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, (BAND + 2) * BLOCK_BYTES + 9]


@pytest.fixture
def endpoint():
    endpoint = asyncio.run(RelayWorker("relay", 2).open(1 << 22))
    yield endpoint
    os.close(int(endpoint.path.rsplit("/", 1)[1]))


@pytest.mark.parametrize("count", SIZES)
def test_a_gpu_digests_as_the_relay_does(count, gpu):
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    assert tensor_digests([torch.from_numpy(data).to(gpu)]) == [tensor_digest(data, MULTILINEAR)]


def test_jax_digests_there_alike(gpu, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take three quarters of the GPU
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU here")
    data = np.random.default_rng(0).integers(0, 256, 9 * BLOCK_BYTES + 5, dtype=np.uint8)
    assert multilinear_jax.digest(jax, data) == tensor_digest(data, MULTILINEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_and_all_bit_patterns_are_digested_as_their_bytes(dtype, gpu):
    values = torch.tensor([0.0, -0.0, float("nan"), float("-inf"), 1e-40, 3.0]).repeat(7001).to(dtype)
    whole = values.to(gpu).view(3, -1)
    for view in (whole, whole[1:], whole[:, 1::2], whole[1, 3:]):
        here = view.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        assert tensor_digests([view]) == [tensor_digest(here, MULTILINEAR)]


def test_slots_are_registered_until_they_are_closed(endpoint, gpu):
    writer, reader = open_writer(endpoint), open_reader(endpoint)
    with warnings.catch_warnings(record=True) as refused:
        warnings.simplefilter("always")
        writer.pin(pinned)
        reader.pin(pinned)
    assert all("801" in str(one.message) for one in refused), refused  # memory that is only read
    slots = [as_tensor(one._memory.data[1]) for one in (writer, reader)]
    areas = [one._memory._area for one in (writer, reader)]  # what the tensors see, kept
    assert slots[0].is_pinned() and (slots[1].is_pinned() or refused)
    writer.close()
    reader.close()
    assert not slots[0].is_pinned() and not slots[1].is_pinned() and len(areas) == 2


def test_a_refused_registration_leaves_no_error_behind(endpoint, gpu):
    writer = open_writer(endpoint)
    undo = pinned(writer._memory._area)
    with pytest.warns(UserWarning, match="cannot be registered"):
        pinned(writer._memory._area)
    assert torch.ones(3, device=gpu).sum().item() == 3
    undo()
    undo()
    assert torch.ones(3, device=gpu).sum().item() == 3
    writer.close()


def test_bytes_go_to_places_in_one_piece_and_in_rows(endpoint, gpu):
    writer = open_writer(endpoint)
    writer.pin(pinned)
    slot = writer._memory.data[0][: 40 * 60].reshape(40, 60)
    slot[:] = 0
    tensors = [torch.full((8, 60), 3, dtype=torch.uint8, device=gpu), torch.arange(240, device=gpu).byte()]
    copy_from_device(gpu, tensors, [slot[:8], slot[10:, :8]], torch.uint8)
    assert (slot[:8] == 3).all() and slot[10:, :8].reshape(-1).tolist() == list(range(240))
    assert slot.sum(dtype=int) == 8 * 60 * 3 + sum(range(240))
    writer.close()


def test_a_version_goes_from_gpu_to_gpu(gpu, monkeypatch):
    model = make_model("qwen3 tied", 1, scale=1.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    weights = {name: parameter.detach().to(gpu) for name, parameter in model.named_parameters()}
    buffers = DeviceBuffers(weights, torch.bfloat16, gpu)
    relay = RelayWorker("relay", 2)
    endpoint = asyncio.run(relay.open(buffers.weights_bytes))
    writer, reader = open_writer(endpoint), open_reader(endpoint)
    filling = writer.begin(1, buffers.manifest)
    buffers.copy(writer, filling)
    digest = writer.end(filling, buffers.manifest, buffers.block_digests())
    staged = asyncio.run(relay.stage(1, digest))
    assert staged.digest == digest == buffers.digest() and kind_of(digest) == MULTILINEAR
    with reader.view(1) as (_, tensors):
        for tensor in tensors:
            there = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).view(tensor.shape)
            assert torch.equal(there, weights[tensor.name].cpu().bfloat16()), tensor.name
    options = {"device": gpu.type, "dtype": "bfloat16", "slots": 4}
    engine = make_engine(make_model("qwen3 tied", 2).bfloat16(), **options)
    read_back: list[TorchEngine] = []
    monkeypatch.setattr(TorchEngine, "buffers", lambda self: read_back.append(self))
    assert engine.stage(1, reader) == (digest, digest)
    engine.swap(1)
    assert engine.digest() == digest and not read_back
    works = [make_work(i, prompt_of(i, 9), Sampling(max_tokens=12, ignore_eos=True)) for i in range(4)]
    fresh = make_engine(model.bfloat16(), **options)
    assert {i: one[0] for i, one in run(engine, works).items()} == {
        i: one[0] for i, one in run(fresh, works).items()
    }
    reader.close()
    writer.close()
