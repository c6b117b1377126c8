"""Memory that tensors give back: what is kept comes back bit for bit, and the kernel has the memory
meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from millrace.core.errors import StorageError
from millrace.devices import released_memory
from millrace.devices.large_memory import trim
from millrace.devices.released_memory import ReleasedMemory

MEGABYTE = 1 << 20


def anonymous_bytes() -> int:
    """Of this process, resident."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def test_the_kernel_has_the_memory_until_it_is_taken_again(tmp_path: Path) -> None:
    kept, forgotten = torch.rand(10 * MEGABYTE), torch.rand(10 * MEGABYTE)
    copy, before = kept.clone(), anonymous_bytes()
    released = ReleasedMemory([forgotten], [kept], directory=tmp_path)
    assert before - anonymous_bytes() > 75 * MEGABYTE  # of 80
    assert not list(tmp_path.iterdir())  # the file has no name
    released.take_again()
    assert torch.equal(kept, copy)
    assert not forgotten[2048:-2048].any()


def test_addresses_and_views_stay(tmp_path: Path) -> None:
    weights = torch.rand(3, 1000, 1000)
    view, numbers, address = weights[1].T, weights.numpy(), weights.data_ptr()
    copy = weights.clone()
    ReleasedMemory([], [weights, view], directory=tmp_path).take_again()
    assert weights.data_ptr() == address
    assert torch.equal(view, copy[1].T) and (numbers == copy.numpy()).all()


def test_what_shares_a_storage_with_kept_numbers_is_kept(tmp_path: Path) -> None:
    weights = torch.rand(MEGABYTE)
    copy = weights.clone()
    ReleasedMemory([weights[:1000]], [weights[1000:]], directory=tmp_path).take_again()
    assert torch.equal(weights, copy)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 4095, 4096, 5000])
def test_tensors_of_any_size_come_back(size: int, tmp_path: Path) -> None:
    tensors = [torch.rand(size), torch.rand(size).to(torch.bfloat16), torch.arange(size)]
    copies = [tensor.clone() for tensor in tensors]
    released = ReleasedMemory([], tensors, directory=tmp_path)
    released.take_again()
    released.take_again()
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_several_threads_read_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(released_memory, "PART_BYTES", 1 << 16)
    tensors = [torch.rand(size) for size in (MEGABYTE, 30_000, 5000)]
    copies = [tensor.clone() for tensor in tensors]
    ReleasedMemory([], tensors, directory=tmp_path).take_again()
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_tensors_of_another_device_than_the_one_that_computes_stay(tmp_path: Path) -> None:
    weights = torch.rand(MEGABYTE)
    trim()  # what earlier tests have freed
    copy, before = weights.clone(), anonymous_bytes()
    released = ReleasedMemory([weights], device_type="cuda", directory=tmp_path)
    assert before - anonymous_bytes() < MEGABYTE and torch.equal(weights, copy)
    released.take_again()
    assert torch.equal(weights, copy)


def test_without_room_for_the_file_nothing_is_given_back(tmp_path: Path) -> None:
    weights = torch.rand(MEGABYTE)
    copy = weights.clone()
    with pytest.raises(StorageError, match="nowhere"):
        ReleasedMemory([], [weights], directory=tmp_path / "nowhere")
    assert torch.equal(weights, copy)
