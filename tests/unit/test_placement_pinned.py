"""Slots that a GPU copies to and from: registered with it where it has one, and with a double here."""

from __future__ import annotations

import asyncio
import os

import device_double
import numpy as np
import pytest
import torch

from millrace.core.digest import NamedBuffer, digest_blocks
from millrace.devices import pinned
from millrace.weights.manifest import make_manifest
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer


@pytest.fixture
def runtime(monkeypatch):
    return device_double.runtime(monkeypatch)


@pytest.fixture
def endpoint():
    endpoint = asyncio.run(RelayWorker("relay", 3).open(5000))
    yield endpoint
    os.close(int(endpoint.path.rsplit("/", 1)[1]))


def test_the_slots_are_registered_once_and_until_the_end(runtime, endpoint):
    writer, reader = open_writer(endpoint), open_reader(endpoint)
    for one in (writer, reader, writer):
        one.pin(pinned.pinned)
    sizes = sorted(runtime.registered.values())
    assert sizes == [(3 * 8192, 0), (3 * 8192, pinned.READ_ONLY)]
    assert all(address % 4096 == 0 for address in runtime.registered)
    writer.close()
    assert [flags for _, flags in runtime.registered.values()] == [pinned.READ_ONLY]
    reader.close()
    reader.close()
    assert not runtime.registered and not runtime.forgotten


def test_slots_that_cannot_be_registered_are_told_once_and_used_all_the_same(runtime, endpoint):
    runtime.code, reader = 2, open_reader(endpoint)
    with pytest.warns(UserWarning, match=r"memory of .*\(CUDA error 2\).* locked memory") as warnings:
        reader.pin(pinned.pinned)
        reader.pin(pinned.pinned)
    assert len(warnings) == 1 and runtime.forgotten == 1
    assert reader.versions() == []
    reader.close()


def test_bytes_that_are_only_read_are_copied_without_a_word():
    source = np.arange(100, dtype=np.uint8)
    source.flags.writeable = False
    target = torch.zeros(100, dtype=torch.uint8)
    buffers = [NamedBuffer("a", "uint8", (100,), data) for data in (source, target)]
    none = [NamedBuffer("b", "uint8", (0,), data) for data in (source[:0], target[:0])]
    pinned.copy_to_device(torch.device("cpu"), None, [buffers[0], none[0]], [buffers[1], none[1]])
    assert torch.equal(target, torch.arange(100, dtype=torch.uint8))


def test_a_rank_registers_the_pages_of_its_own_blocks_once_in_each_slot(runtime):
    """Of two tensors of 64 pages, rank 1 of 4 has 16 pages each, and one column, which the host fills."""
    shape = (4 * 16, 4096)
    tensors = [NamedBuffer(name, "uint8", shape, np.zeros(64 * 4096, np.uint8)) for name in ("a", "b")]
    endpoint = asyncio.run(RelayWorker("relay", 2).open(2 * 64 * 4096))
    writer, manifest = open_writer(endpoint), make_manifest(tensors)
    blocks = [NamedBuffer(name, "uint8", (16, 4096), b"", (16, 0)) for name in ("a", "b")]
    column = NamedBuffer("a", "uint8", (64, 1), b"", (0, 0))
    for version in range(4):  # of two slots
        filling = writer.begin(version, manifest)
        writer.pin(pinned.pinned, pinned.page_areas(writer.places(filling, manifest, [*blocks, column])))
        writer.end(filling, manifest, digest_blocks(tensors))
    assert sorted(runtime.registered.values()) == [(16 * 4096, 0)] * 2 * 2
    writer.close()
    assert not runtime.registered
    os.close(int(endpoint.path.rsplit("/", 1)[1]))


def test_areas_are_whole_pages_and_no_page_is_in_two(runtime):
    memory = np.zeros(12 * 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    cuts = [(0, 10), (10, 5000), (4096 * 4 - 1, 4096 * 4 + 1), (4096 * 8, 4096 * 9), (50, 50)]
    areas = pinned.page_areas([memory[first + begin : first + end] for begin, end in cuts])
    begins = [(area.ctypes.data - memory.ctypes.data - first) // 4096 for area in areas]
    assert [(begin, len(area) // 4096) for begin, area in zip(begins, areas, strict=True)] == [
        (0, 2),
        (3, 2),
        (8, 1),
    ]


def test_places_that_follow_one_another_are_one_copy_up_to_the_size_of_a_buffer():
    memory = np.zeros(100, np.uint8)
    begin = memory.ctypes.data
    columns = memory[60:70].reshape(5, 2)[:, :1]
    places = [memory[:40], memory[40:60], memory[60:60], columns, memory[70:]]
    runs = pinned.joined_runs(places, itemsize=2, staged_bytes=48)
    assert runs == [
        (begin, [(0, 0, 20), (1, 0, 4)]),
        (begin + 48, [(1, 4, 10)]),
        (begin + 70, [(4, 0, 15)]),
    ]
    assert [run.num_values for run in runs] == [24, 6, 15]


@pytest.mark.parametrize("staged_bytes", [2, 64, 1 << 20])
def test_tensors_are_rounded_on_their_way_whatever_fits_into_a_buffer(staged_bytes, monkeypatch):
    monkeypatch.setattr(pinned, "STAGED_BYTES", staged_bytes)
    tensors = [torch.randn(5, 7), torch.randn(3), torch.randn(0), torch.randn(6, 4).T, torch.randn(64)]
    memory = np.zeros(2 * sum(tensor.numel() for tensor in tensors), np.uint8)
    ends = np.cumsum([2 * tensor.numel() for tensor in tensors])
    places = np.split(memory, ends[:-1])
    pinned.copy_from_device(torch.device("cpu"), tensors, places, torch.bfloat16)
    due = torch.cat([tensor.reshape(-1).bfloat16() for tensor in tensors])
    assert torch.equal(torch.from_numpy(memory).view(torch.bfloat16), due)
